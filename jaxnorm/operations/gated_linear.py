"""The functions gated_linear and activation_linear: the second half of an MLP.

They compute an elementwise function and the linear layer after it::

    step                        computed by                     saved for the backward pass
    h = activation(gate) * up   one fused pass, rounded once    gate and up
    y = h @ weight + bias       `products.dot`                  weight

In activation_linear, the first step is ``h = activation(x)``, and x is saved.

`recomputation.recomputed` treats both steps as one function, so h is not saved. In the backward
pass, one fused loop recomputes h and computes the gradients of gate and up.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, products
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.primitives import eager, recomputation
from jaxnorm_kernels.specs import FLOAT_DTYPES, Activation

# With `type` statements, signatures and help() show the short names of these aliases. With plain
# assignments, they would show the long types behind the names.
type ElementwiseFunction = Activation | Callable[[jax.Array], jax.Array]
type Product = Callable[[jax.Array, Any], jax.Array]
type Sharding = NamedSharding | PartitionSpec

Function = Literal["gated_linear", "activation_linear"]

# Maps each function to the names of the arrays that its elementwise step takes.
_OPERANDS: dict[Function, tuple[str, ...]] = {
    "gated_linear": ("gate", "up"),
    "activation_linear": ("x",),
}
assert {*products.ACTIVATIONS} == {*get_args(Activation)}


@eager.compiled("gate", "up", "weight", "bias", functions=("activation", "product"))
def gated_linear(
    gate: ArrayLike,
    up: ArrayLike,
    weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: ElementwiseFunction = "silu",
    dtype: DTypeLike | None = None,
    product: Product | None = None,
    out_sharding: Sharding | None = None,
) -> jax.Array:
    r"""The down projection of a gated MLP (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    .. math::
      y = (\mathrm{activation}(\mathrm{gate}) \cdot \mathrm{up}) \, \mathrm{weight} + \mathrm{bias}

    Only ``gate``, ``up`` and ``weight`` are saved for the backward pass. The hidden activations
    ``h = activation(gate) * up`` are not saved. The backward pass recomputes them while it computes
    the gradients of ``gate`` and ``up``. It also recomputes the arrays that the derivative of the
    activation needs. No matmul runs twice.

    The elementwise arithmetic is float32 (float64 if ``gate`` or ``up`` is float64). h is rounded
    once, to the promoted dtype of ``gate`` and ``up``. Before the matmul, h and ``weight`` are cast
    to the dtype to which they promote, or to ``dtype`` if ``dtype`` has fewer bits. If ``dtype``
    has more bits, it is only the dtype of y. The sums of the matmul are float32 (float64 if the
    matmul's operands or the output are float64). ``bias`` is added before the sums are rounded. The
    backward pass of a 16-bit matmul uses 16-bit matmuls.

    Args:
      gate: array (..., f); bfloat16, float16, float32 or float64.
      up: array of gate's shape; any of these dtypes.
      weight: array (f, n); any of these dtypes.
      bias: array (n,); any of these dtypes. None for no bias.
      activation: the name of an activation, or an elementwise function of one array. The names are
        ``"silu"``, ``"gelu"``, ``"relu"``, ``"leaky_relu"`` and ``"sigmoid"``. A name stands for
        the function of :mod:`jax.nn` with its default arguments (so gelu is the tanh
        approximation). A function is called with an array of the arithmetic dtype. It may close
        over arrays, which then have gradients. Outside `jax.jit`, each call traces the function
        again.
      dtype: dtype of y; by default, the promoted dtype of ``gate``, ``up`` and ``weight``.
      product: function (h, weight) -> y that replaces ``h @ weight``, such as `jax.lax.ragged_dot`
        for experts, or a quantised or low-rank matmul. Its arguments have the matmul's dtype. It
        may apply dropout or sharding constraints to h, and may close over arrays. The backward pass
        recomputes the intermediates that the derivative of ``product`` needs. Effects of
        ``product``, such as `jax.debug.print`, happen once. If an effect has a result or is inside
        a `jax.jit` in ``product``, nothing is recomputed, and more arrays are saved. With
        ``product``, weight may be an array of any shape or a pytree of arrays. Leaves that are not
        float arrays are passed to ``product`` without a cast.
      out_sharding: `NamedSharding` or `PartitionSpec` of the matmul's result, on a mesh with
        Explicit axes, as in `jnp.einsum`. It is required if the axis f is sharded (tensor
        parallelism).

    Returns:
      y, array (..., n) in ``dtype``.

    Differentiable in reverse and forward mode, to any order; gradients have the dtypes of their
    arguments.

    On a mesh, the rows and the axes f and n may be sharded. With Explicit mesh axes, weight is
    gathered if its axis f is sharded differently from gate's axis f. It is also gathered if its
    axis n is sharded over mesh axes that also shard gate. Both cases occur with FSDP. Weight is
    gathered in the forward pass, and again in the backward pass.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: the shape of an array is wrong; ``activation`` or ``out_sharding`` is wrong;
        ``out_sharding`` is missing.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, w_gate, w_up = jnp.ones((8, 64)), jnp.ones((64, 256)), jnp.ones((64, 256))
      >>> jaxnorm.gated_linear(x @ w_gate, x @ w_up, jnp.ones((256, 64))).shape
      (8, 64)
      >>> y = jaxnorm.gated_linear(
      ...     x @ w_gate, x @ w_up, jnp.ones((256, 64)), activation="gelu", dtype=jnp.bfloat16
      ... )
      >>> y.dtype.name
      'bfloat16'
    """
    return _linear_of(
        "gated_linear", (gate, up), weight, bias, activation, dtype, product, out_sharding
    )


@eager.compiled("x", "weight", "bias", functions=("activation", "product"))
def activation_linear(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: ElementwiseFunction = "gelu",
    dtype: DTypeLike | None = None,
    product: Product | None = None,
    out_sharding: Sharding | None = None,
) -> jax.Array:
    r"""The second half of an MLP that has no gate: an activation and the linear layer after it.

    .. math::
      y = \mathrm{activation}(x) \, \mathrm{weight} + \mathrm{bias}

    This is :func:`jaxnorm.gated_linear` without ``up``. Only x and weight are saved for the
    backward pass. The default activation, gelu, is from Hendrycks and Gimpel (2016,
    https://arxiv.org/abs/1606.08415).

    Args:
      x: array (..., f); bfloat16, float16, float32 or float64.
      weight: array (f, n); any of these dtypes.
      bias: array (n,); any of these dtypes. None for no bias.
      activation, dtype, product, out_sharding: as in :func:`jaxnorm.gated_linear`.

    Returns:
      y, array (..., n) in ``dtype``. Differentiable like :func:`jaxnorm.gated_linear`.

    Raises:
      TypeError, ValueError: as for :func:`jaxnorm.gated_linear`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, w_in, w_out = jnp.ones((8, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
      >>> jaxnorm.activation_linear(x @ w_in, w_out, bias=jnp.zeros(64)).shape
      (8, 64)
    """
    return _linear_of(
        "activation_linear", (x,), weight, bias, activation, dtype, product, out_sharding
    )


def _linear_of(
    function: Function,
    given: tuple[ArrayLike, ...],
    weight: Any,
    bias: ArrayLike | None,
    activation: ElementwiseFunction,
    dtype: DTypeLike | None,
    product: Product | None,
    out_sharding: Sharding | None,
) -> jax.Array:
    names = _OPERANDS[function]
    rows = [checks.float_array(function, name, a) for name, a in zip(names, given)]
    if bias is not None:
        bias = checks.float_array(function, "bias", bias)
    shape = rows[0].shape
    checks.features(function, names[0], shape, "f")
    for name, a in zip(names[1:], rows[1:]):
        checks.same_shape(function, name, a.shape, shape, f"the shape of {names[0]}")
    weights, tree = _weights(function, weight, product)
    if product is None:
        also = ", or give product= another product"
        checks.weight(function, weights[0].shape, shape, of=names[0], also=also)
    _check_sharding(function, product, out_sharding)
    f = _elementwise(function, activation)

    h_dtype = functools.reduce(checks.product_dtype, [a.dtype for a in rows])
    floats = [a.dtype for a in weights if _is_float(a)]
    promoted = functools.reduce(checks.product_dtype, floats, h_dtype)
    y_dtype = checks.output_dtype(function, dtype, promoted)
    product_dtype = min(promoted, y_dtype, key=lambda dtype: dtype.itemsize)
    wide = checks.arithmetic_dtype(product_dtype, y_dtype)

    rows = [sharding.lie_alike(a, rows[0]) for a in rows]
    biases = [] if bias is None else [bias]
    operands = iter(sharding.vary_alike([*rows, *weights, *biases]))
    rows, weights, biases = ([next(operands) for _ in a] for a in (rows, weights, biases))
    if product is None:
        weight_sharding, its_sharding = _shardings(function, rows[0], weights[0], out_sharding)
        # If no bias is added, the matmul itself rounds its sums to y's dtype. This avoids a
        # separate pass over memory.
        #
        # If the axis f is sharded, the matmul computes partial sums on each device, and an
        # all-reduce adds them. As in plain JAX, the partial sums are rounded before the all-reduce:
        # float32 sums have twice the bytes of 16-bit sums.
        is_split = weight_sharding is not None and weight_sharding.spec[0] is not None
        is_alone = is_split or (y_dtype == product_dtype and not biases)
        precision = jax.config.jax_default_matmul_precision
        options = products.Dot(product_dtype, precision, weight_sharding, its_sharding)
        multiply: Product = functools.partial(products.dot, options, y_dtype if is_alone else wide)
    else:
        multiply = functools.partial(_by_function, function, product, product_dtype)

    def multiplied(*arrays: jax.Array) -> jax.Array:
        rows, weights = arrays[: len(names)], arrays[len(names) :]
        return multiply(f(*rows).astype(h_dtype), jax.tree.unflatten(tree, weights))

    with jax.named_scope(f"jaxnorm.{function}"):
        y = recomputation.recomputed(multiplied, rows, *weights)
        for b in biases:
            y = y.astype(wide)
            y = y + sharding.broadcast_alike(_of_columns(function, b, y), y)
        return y.astype(y_dtype)


def _elementwise(function: Function, activation: ElementwiseFunction) -> Callable[..., jax.Array]:
    """Return the elementwise function of the arrays, whose result is the matmul's first operand.

    It computes ``activation(gate) * up`` for gated_linear, and ``activation(x)`` for
    activation_linear. Its result has the arithmetic dtype: float32 or float64.
    """
    is_name = isinstance(activation, str) and activation in products.ACTIVATIONS
    if not (is_name or callable(activation)):
        raise ValueError(
            f"{function}: activation={activation!r}; expected one of "
            f"{', '.join(map(repr, products.ACTIVATIONS))}, or an elementwise function of one "
            "array, e.g. jnp.tanh; for none, lambda x: x"
        )
    of_one = activation if callable(activation) else products.ACTIVATIONS[activation]

    def f(x: jax.Array, *up: jax.Array) -> jax.Array:
        wide = checks.arithmetic_dtype(*[a.dtype for a in (x, *up)])
        h = of_one(x.astype(wide))
        if not isinstance(h, jax.typing.ArrayLike) or jnp.iscomplexobj(h):
            raise TypeError(
                f"{function}: activation returned {_given(h)}; expected an array of real numbers, "
                "one for each element of its argument"
            )
        h = jnp.asarray(h)
        if h.shape != x.shape:
            raise ValueError(
                f"{function}: activation returned shape {h.shape} of an array of shape {x.shape}; "
                "expected its shape: a function that maps each element to one number"
            )
        return functools.reduce(jnp.multiply, [a.astype(wide) for a in (h, *up)])

    return f


def _by_function(
    function: Function, product: Product, dtype: np.dtype, h: jax.Array, weight: Any
) -> jax.Array:
    """Return ``product(h, weight)``.

    Before the call, h and the float arrays in weight are cast to `dtype`.
    """
    weight = jax.tree.map(lambda a: a.astype(dtype) if _is_float(a) else a, weight)
    y = product(h.astype(dtype), weight)
    if not isinstance(y, jax.Array) or not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(
            f"{function}: product returned {_given(y)}; expected an array of floating-point "
            "numbers, the result of h @ weight"
        )
    return y


def _given(result: Any) -> str:
    """Describe a wrong result of a user's function, for an error's text.

    An array is described by its dtype, and any other object by its type.
    """
    is_array = isinstance(result, jax.Array)
    return f"dtype {result.dtype.name}" if is_array else f"a {type(result).__name__}"


def _shardings(
    function: Function, x: jax.Array, weight: jax.Array, out_sharding: Sharding | None
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Return the sharding of weight in the matmul, and the sharding of the matmul's result.

    Without Explicit mesh axes, both are None. Check the argument ``out_sharding``.
    """
    layout = products.layout_of(x, weight)
    if layout is None:
        if out_sharding is not None:
            raise ValueError(
                f"{function}: out_sharding={out_sharding}, of arrays that lie on no mesh with "
                "Explicit axes; expected None; leave it out, or on Auto axes constrain the result "
                "by jax.lax.with_sharding_constraint"
            )
        return None, None
    if out_sharding is None:
        if layout.cols:
            raise ValueError(
                f"{function}: the mesh axes {layout.cols} split the last axis of the product's "
                f"first factor, of shape {x.shape}, over which it sums, and out_sharding=None; "
                "expected how the sums lie: give out_sharding=, e.g. "
                f"{layout.spec('z')}"
            )
        out_sharding = layout.spec("z")
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(layout.mesh, out_sharding)
    return layout.sharding("weight"), out_sharding


def _weights(
    function: Function, weight: Any, product: Product | None
) -> tuple[list[jax.Array], Any]:
    """Check weight, and return its leaves and its pytree structure.

    If `product` is None, weight must be a single array.
    """
    if product is None:
        return jax.tree.flatten(checks.float_array(function, "weight", weight))
    if not callable(product):
        raise TypeError(
            f"{function}: product is a {type(product).__name__}; expected a function of (h, "
            "weight), or None for h @ weight"
        )
    leaves, tree = jax.tree.flatten(weight)
    for leaf in leaves:
        if not (isinstance(leaf, jax.typing.ArrayLike) or hasattr(leaf, "__jax_array__")):
            raise TypeError(
                f"{function}: weight has a {type(leaf).__name__}; expected an array, or a tree of "
                "arrays; the function product may close over other values"
            )
    return [checks.any_array(function, "weight", leaf) for leaf in leaves], tree


def _check_sharding(
    function: Function, product: Product | None, out_sharding: Sharding | None
) -> None:
    """Check the type of ``out_sharding``, which must be None if there is a ``product``."""
    if out_sharding is None:
        return
    if not isinstance(out_sharding, (NamedSharding, PartitionSpec)):
        raise TypeError(
            f"{function}: out_sharding is a {type(out_sharding).__name__}; expected a "
            "NamedSharding, a PartitionSpec, or None"
        )
    if product is not None:
        raise ValueError(
            f"{function}: out_sharding={out_sharding} and product=; expected one of them; give it "
            "to the product inside, e.g. jnp.einsum(..., out_sharding=out_sharding)"
        )


def _of_columns(function: Function, bias: jax.Array, y: jax.Array) -> jax.Array:
    """Cast bias to y's dtype, and give it leading axes of size 1, so that it broadcasts to y.

    Raise ValueError unless bias has one number for each column of the matmul's result y.
    """
    why = "a number for each column of the product"
    checks.same_shape(function, "bias", bias.shape, y.shape[-1:], why)
    return jnp.expand_dims(bias.astype(y.dtype), range(y.ndim - 1))


def _is_float(a: jax.Array) -> bool:
    return a.dtype.name in FLOAT_DTYPES
