"""implementation_for: report which implementation would run a call, and why."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.operations import checks
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.operations.linear_loss_call import OF_LOGITS
from jaxnorm.primitives import mistakes
from jaxnorm_kernels import operations

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# Maps the functions without kernels to the reasons that `implementation_for` gives for XLA.
_XLA_ONLY = {
    "gated_linear": "its matmul is XLA's, which computes the rest in fusions",
    "activation_linear": "its matmul is XLA's, which computes the rest in fusions",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The implementations that run the forward and the backward pass of a call, with reasons."""

    forward: backends.Choice
    backward: backends.Choice

    def __str__(self) -> str:
        return f"forward:  {self.forward}\nbackward: {self.backward}"


def implementation_for(
    function: str,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    /,
    *,
    platform: str | None = None,
    **arguments: Any,
) -> Plan:
    """Return the implementations that would run a call of `function`, and the reasons.

    The call is traced, but not run. The plan says what runs, not what is fastest: plain JAX may be
    faster than a kernel, because XLA can fuse plain JAX with other operations. ``jax.vmap`` adds a
    batch axis to x: put the size of the batch in front of `shape`. If parameters are batched, or if
    their gradients are computed for each batch element, pass parameters whose first axis is the
    batch.

    Args:
      function: name of a public function, such as ``"add_rms_norm"``.
      shape, dtype: shape and dtype of the first argument (x or logits); inside ``jax.shard_map``,
        the shape of a shard.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``; by default, the platform of JAX's
        default device. (A real call uses the platform for which its program is lowered.)
      arguments: the function's arguments after the first one, by name. Arrays, such as ``scale``,
        may be ``jax.ShapeDtypeStruct``. Required arrays may be omitted. A residual or a gate then
        has the shape and dtype of x, labels are int32, and a weight is square. cos and sin are then
        float32 tables that rotate all columns: for an x of shape (..., length, heads, d), their
        shape is (length, 1, d / 2). The backward pass of the plan computes the gradients of all
        float arrays, except cos, sin and scales of logits.

    Returns:
      A :class:`Plan`: ``forward`` and ``backward``, each with ``name`` and ``reason``; ``print`` it
      for two lines of text. XLA computes all matmuls. The plan of ``"rms_norm_linear"`` is the plan
      of its norm, unless ``implementation="mosaic"`` requests the kernel that fuses the norm and
      the matmul in the forward pass. The plan of a linear loss is the plan of the function that
      computes the loss of a chunk's logits.

    Raises:
      TypeError, ValueError: the function or the platform is unknown; or as for the function.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> scale = jax.ShapeDtypeStruct((4096,), jnp.float32)
      >>> plan = jaxnorm.implementation_for(
      ...     "rms_norm", (8192, 4096), jnp.bfloat16, scale=scale, platform="tpu"
      ... )
      >>> plan.forward.name, plan.backward.name
      ('xla', 'xla')
    """
    caller = "implementation_for"
    checks.one_of(caller, "function", function, functions())
    platform = backends.local_platform() if platform is None else platform
    checks.one_of(caller, "platform", platform, _PLATFORMS)
    x_dtype = checks.dtype(caller, "dtype", dtype)
    try:
        x = jax.ShapeDtypeStruct(tuple(shape), x_dtype)
        jax.eval_shape(jnp.zeros_like, x)  # This raises an error for a size that is not valid.
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{caller}: shape={shape!r}; expected a tuple of sizes, e.g. x.shape"
        ) from error
    call = getattr(jaxnorm, function)
    arguments = mistakes.respelled(function, inspect.signature(call).parameters, arguments)
    arguments = {**_required(call, x, arguments), **arguments}
    arrays = {name: a for name, a in arguments.items() if hasattr(a, "shape")}
    options = {name: a for name, a in arguments.items() if name not in arrays}
    scale = "scale" if function in ("softmax", "log_softmax") else "logits_scale"
    floats = {n: a for n, a in arrays.items() if n != scale and is_differentiated(n, a)}
    constants = {name: a for name, a in arrays.items() if name not in floats}
    if function in _XLA_ONLY or function in OF_LOGITS:
        jax.eval_shape(lambda x, arrays: call(x, **arrays, **options), x, arrays)
    if function in _XLA_ONLY:
        only = backends.Choice("xla", _XLA_ONLY[function])
        return Plan(only, only)
    if function in OF_LOGITS:
        return _of_linear_logits(function, x, arguments, platform)

    def forward(x: Any, floats: Any, constants: Any) -> Any:
        return call(x, **floats, **constants, **options)

    def backward(x: Any, floats: Any, constants: Any) -> Any:
        y, pullback = jax.vjp(lambda x, floats: forward(x, floats, constants), x, floats)
        return pullback(jax.tree.map(jnp.ones_like, y))

    def choice(of: Callable[..., Any], direction: str) -> backends.Choice:
        program = jax.make_jaxpr(of)(x, floats, constants)
        first = next((c for c in calls_in(program.jaxpr) if c.spec.direction == direction), None)
        if first is not None and first.implementation is None:
            return backends.choose(first.as_seen_by, platform)
        name = arguments["implementation"]
        backends.check_platforms(function, name, [platform])
        if first is not None:  # None only for rms_norm_linear, which checks `name` itself
            first.check_implementation()
        return backends.Choice(name, "asked for by name")

    return Plan(choice(forward, "fwd"), choice(backward, "bwd"))


def is_differentiated(name: str, array: Any) -> bool:
    """Return True for a float operand that is not a rotary table.

    No kernel computes the gradients of rotary tables.
    """
    return jnp.issubdtype(array.dtype, jnp.floating) and operations.OPERANDS.get(name) != "table"


def functions() -> tuple[str, ...]:
    """Return the names of all public functions that `implementation_for` accepts."""
    return (*operations.FUNCTIONS, "rms_norm_linear", *_XLA_ONLY, *OF_LOGITS)


def _of_linear_logits(
    function: str, x: jax.ShapeDtypeStruct, arguments: dict[str, Any], platform: str
) -> Plan:
    """Return the plan of a linear loss: how the loss of one chunk's logits is computed.

    For the cross-entropy, the dtype of the logits is the argument ``dtype`` or, by default, x's
    dtype. For the other losses, the logits are float32 (float64 for float64 operands).
    """
    weight = arguments["weight"]
    of_logits = next(name for linear, name in OF_LOGITS.items() if linear == function)
    dtype = arguments.get("dtype") or x.dtype
    if of_logits != "softmax_cross_entropy_with_integer_labels":
        dtype = jnp.promote_types(dtype, jnp.float32)
    names = ("implementation", "logits_scale", "logit_softcap", "teacher_logit_softcap", "reverse")
    options = {name: arguments[name] for name in names if name in arguments}
    scale, where = options.get("logits_scale"), arguments.get("where")
    if hasattr(scale, "shape"):  # It may be a scale for each row. A scalar has the same plan.
        options["logits_scale"] = jax.ShapeDtypeStruct((), getattr(scale, "dtype", x.dtype))
    if where is not None and jnp.ndim(where) == len(x.shape):
        options["where"] = jax.ShapeDtypeStruct((1, weight.shape[-1]), jnp.bool_)  # masks classes
    rows = math.prod(x.shape[:-1])
    chunk = min(arguments.get("chunk") or rows, rows)
    plan = implementation_for(
        of_logits, (chunk, weight.shape[-1]), dtype, platform=platform, **options
    )
    which = f"as {of_logits}, for each chunk of rows"
    return Plan(
        *(
            dataclasses.replace(choice, reason=f"{choice.reason}; {which}")
            for choice in (plan.forward, plan.backward)
        )
    )


def calls_in(jaxpr: Any) -> Iterator[Call]:
    """Yield the `Call` of each equation in a jaxpr, in order, including inner jaxprs."""
    for equation in jaxpr.eqns:
        if isinstance(equation.params.get("call"), Call):
            yield equation.params["call"]
        for inner in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda a: hasattr(a, "eqns") or hasattr(a, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from calls_in(inner)


def _required(
    call: Callable[..., Any], x: jax.ShapeDtypeStruct, arguments: dict[str, Any]
) -> dict[str, jax.ShapeDtypeStruct | None]:
    """Return a dict that maps required operands missing in `arguments` to abstract arrays.

    For a missing ``scale``, the value is None.
    """
    *rows, cols = x.shape or (0,)

    def operand(name: str) -> jax.ShapeDtypeStruct | None:
        if name == "labels":
            axes = checks.axes(call.__name__, arguments.get("axis", -1), x.shape, of="logits")
            sizes = tuple(size for a, size in enumerate(x.shape) if a not in axes)
            return jax.ShapeDtypeStruct(sizes, jnp.int32)
        if "weight" in name:
            return jax.ShapeDtypeStruct((cols, cols), x.dtype)
        if name in ("cos", "sin"):
            positions = (rows[-2], 1) if len(rows) > 1 else ()
            table = jax.ShapeDtypeStruct((*positions, cols // 2), jnp.float32)
            return next((arguments[n] for n in ("cos", "sin") if n in arguments), table)
        return None if name == "scale" else x

    _, *others = inspect.signature(call).parameters.values()
    lacking = [p.name for p in others if p.default is p.empty and p.name not in arguments]
    return {name: operand(name) for name in lacking}
