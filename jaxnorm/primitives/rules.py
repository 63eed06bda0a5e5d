"""The differentiation, batching and lowering rules that the JAX primitives of all calls share.

A call has a forward, a tangent and a backward pass, and each pass is a JAX primitive. The tangent
pass takes residuals and tangents, and is linear in the tangents. The backward pass takes residuals
and cotangents, and is linear in the cotangents. Each of the two is the transpose of the other.
Second-order derivatives also need the derivatives of the tangent and the backward pass with respect
to the residuals. Plain JAX computes them.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxnorm.calls import private_jax
from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import auto_axes, sharding
from jaxnorm.meshes.sharding import Factors, Shards
from jaxnorm.primitives import eager, remat
from jaxnorm_kernels.specs import Direction

_SUFFIXES = {"fwd": "", "tan": "_tangent", "bwd": "_backward"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function that runs one pass with a kernel. Its lowering may fail with a new version of JAX.

    Attributes:
      run: the function.
      failed: a function that takes an error of the lowering and records it. `Rules.lowered` then
        returns another function for the pass. If the user requested the kernel, `failed` raises an
        error instead.
    """

    run: Run
    failed: Callable[[Exception], None]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return self.run(*arrays)


class Rules:
    """The JAX rules of a family of calls.

    There are two families. One consists of the softmaxes, losses and norms. The other consists of
    the linear losses, whose logits are the result of a matmul. A pass of a softmax, loss or
    norm is a `jaxnorm.calls.call.Call`. A pass of a linear loss is an object of another class, with
    the attributes and methods of a `Call` that are used here. Each family has a subclass of this
    class, which defines the following functions:

    Attributes:
      types: takes a pass and the types of its operands; returns the types of the results.
      plain_jax: computes the results of a pass in plain JAX, without kernels.
      on_shard: computes one device's shards of the results from its shards of the operands.
      forward_jvp: the JVP rule of a forward pass.
      with_residuals: takes a forward pass; returns the forward pass that also returns the arrays
        saved for the derivative, or None if a rematerialisation policy can save none of them.
      names: takes a forward pass; returns the names of its outputs for rematerialisation policies.
        The name is None for an output that policies cannot save.
      derived: takes a forward pass, the outputs of the pass that `with_residuals` returns, and the
        primals and tangents; returns the results and their tangents without another forward pass.
      batch: the batching rule; returns the batched results and their batch axes.
      shards: takes a pass, a function ``run(call, *arrays)`` that computes it on the shards of one
        device, the types of the arrays and the mesh; returns the sharding of the arrays, and the
        function that each device runs.
      factors: returns Shardy's sharding rule, which relates the shardings of a pass's arrays.
    """

    types: Callable[..., list[Any]]
    plain_jax: Callable[..., list[jax.Array]]
    on_shard: Callable[..., list[jax.Array]]
    forward_jvp: Callable[..., tuple[Any, Any]]
    with_residuals: Callable[[Any], Any]
    names: Callable[[Any], Sequence[str | None]]
    derived: Callable[..., tuple[Any, Any]]
    batch: Callable[..., tuple[Arrays, list[int]]]
    shards: Callable[..., Shards]
    factors: Callable[..., Factors]

    def __init__(self) -> None:
        self.primitive = functools.cache(self.registered)
        self.needs: Callable[..., list[list[bool]]] = functools.lru_cache(1024)(self._needs)

    def batched(
        self, call: Any, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[list[jax.Array], list[int | None]]:
        """Batch a call. A result that depends on no batched operand gets no batch axis.

        An example is the sum h of a norm whose scale is batched. If a pass can compute such results
        alone, it runs once, without the batch. If not, the batched call computes them for each
        batch element, and only the results of the first element are used.
        """
        shapes = [
            (*a.shape[:d], *a.shape[d + 1 :]) if d is not None else a.shape
            for a, d in zip(arrays, dims)
        ]
        needs = self.needs(call, *zip(shapes, [a.dtype for a in arrays]))
        is_batched = [d is not None for d in dims]
        free = [not any(map(operator.and_, of_result, is_batched)) for of_result in needs]
        names = tuple(itertools.compress(call.returns, free))
        axes = [(jax.typeof(a), d) for a, d in zip(arrays, dims) if d is not None]
        has_first = all(t.shape[d] != 0 and t.sharding.spec[d] is None for t, d in axes)
        if not (names and has_first):
            results, _ = self.batch(call, arrays, dims)
            return [*results], [0] * len(results)
        batched, once = call, {}
        if (alone := call.without_unused(free)).returns == names:
            firsts = [
                a if d is None else lax.index_in_dim(a, 0, d, keepdims=False)
                for a, d in zip(arrays, dims)
            ]
            once = dict(zip(names, self.bind(alone, *firsts)))
            batched = call.without_unused([not is_free for is_free in free])
        results = () if len(once) == len(free) else self.batch(batched, arrays, dims)[0]
        by_name = dict(zip(batched.returns, results))
        by_name |= once or {name: by_name[name][0] for name in names}
        results = [by_name[name] for name in call.returns]
        return results, [None if is_free else 0 for is_free in free]

    def _needs(self, call: Any, *types: tuple[Sequence[int], Any]) -> list[list[bool]]:
        """Return a list of bools for each result: True for the operands on which it depends."""
        avals = [jax.ShapeDtypeStruct(*of_operand) for of_operand in types]
        # Trace the call for unsharded arrays, whatever mesh the caller has set.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jaxpr = jax.make_jaxpr(functools.partial(self.plain_jax, call))(*avals).jaxpr
        every = range(len(jaxpr.outvars))
        return [partial_eval.dce_jaxpr(jaxpr, [i == j for j in every])[1] for i in every]

    def results(self, call: Any, outputs: Arrays) -> list[jax.Array]:
        """Return the results of a call, given the `outputs` of the pass `with_residuals(call)`."""
        by_name = dict(zip((self.with_residuals(call) or call).returns, outputs))
        return [by_name[name] for name in call.returns]

    def uncompiled(self, call: Any, *arrays: jax.Array) -> list[jax.Array]:
        """Compute the results under `jax.disable_jit`."""
        return self.anywhere(self.on_shard, call, *arrays)

    def lowered(self, call: Any, ctx: Any) -> Run:
        """Return the function to which a pass is lowered on a mesh without Explicit axes."""
        axes = ctx.module_context.axis_context
        if auto_axes.can_partition(axes) and not auto_axes.are_whole(axes):
            return self.partitioned(call)
        return functools.partial(self.plain_jax, call)

    def check_vma(self, call: Any) -> bool:
        """Return the argument ``check_vma`` of the `jax.shard_map` in which a pass runs."""
        return True

    def needs_shards(self, call: Any) -> bool:
        """Return True if the lowering of the call may contain code that XLA cannot partition."""
        return True

    # ---------------------------------------------------------------------------------- the call

    def bind(self, call: Any, *arrays: jax.Array | None) -> list[jax.Array]:
        """Bind the primitive of a pass and return its results. Absent operands are None."""
        function, direction = call.primitives or call.function, call.direction
        leaves = [a for a in arrays if a is not None]
        primitive = self.primitive(function, direction, self._may_be_partitioned(call, leaves))
        # Inside `jax.shard_map`, the arrays may vary over different mesh axes. They are then cast,
        # so that all vary over the same mesh axes. Outside, no mesh is set, and no cast is needed.
        is_outside = jax.sharding.get_abstract_mesh().empty
        operands = leaves if is_outside else sharding.vary_alike(leaves)
        results: list[jax.Array] = primitive.bind(*operands, call=call)
        return results

    def _may_be_partitioned(self, call: Any, arrays: Arrays) -> bool:
        """Return True if XLA's partitioner may need our partitioning rule for this call.

        The rule needs the list of devices when a program is lowered, so programs for an
        `AbstractMesh` or with several meshes fail with the rule. Therefore it is used only if it
        may be needed.
        """
        return (
            jax.device_count() > 1
            and sharding.explicit_mesh([*map(jax.typeof, arrays)]) is None
            and self.needs_shards(call)
        )

    # --------------------------------------------------------------------------- differentiation

    def linear_jvp(self, call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The JVP rule of a tangent or a backward pass."""
        count = call.residuals
        if any(not isinstance(t, ad.Zero) for t in tangents[:count]):
            return self.second_order(call, primals, tangents)
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return self.bind(call, *primals), self.bind(call, *primals[:count], *linear)

    def second_order(self, call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The JVP rule of a tangent or backward pass, for second-order derivatives.

        It is used if a residual has a nonzero tangent. Plain JAX computes the tangents.
        """
        results = self.bind(call, *primals)
        with wide_types_for((*primals, *results)):
            function = functools.partial(self.anywhere, self.plain_jax, call)
            _, tangents_out = jvp(function, primals, tangents)
        eager.check(f"a derivative of {call.function}", call.returns, tangents_out)
        return results, tangents_out

    def tangents_of(
        self, call: Any, residuals: Arrays, tangents: dict[str, Any]
    ) -> list[jax.Array | None]:
        """Run the tangent pass of a call and return the tangents of its results.

        `tangents` maps names of operands to tangents. If all are zero, each result is None.
        """
        nonzeros = nonzero(tangents.items())
        tangent = call.tangent((*nonzeros,))
        if not nonzeros:
            return [None] * len(tangent.returns)
        return [*self.bind(tangent, *residuals, *nonzeros.values())]

    def transpose(self, call: Any, cotangents: Any, *operands: Any) -> list[Any]:
        """The transpose rule: a tangent pass transposes to a backward pass, and vice versa."""
        residuals, linear = operands[: call.residuals], operands[call.residuals :]
        names = call.takes[call.residuals :]
        wanted = [name for name, a in zip(names, linear) if ad.is_undefined_primal(a)]
        if call.direction == "tan":
            by_name = self.transposed_tangent(call, residuals, cotangents, wanted)
        else:
            nonzeros = nonzero(zip(call.wrt, cotangents))
            tangent = call.tangent((*nonzeros,))
            results = self.bind(tangent, *residuals, *nonzeros.values())
            by_name = dict(zip(tangent.returns, results))
        cotangents_out = [by_name.get(name) if name in wanted else None for name in names]
        return [None] * len(residuals) + cotangents_out

    def transposed_tangent(
        self, call: Any, residuals: Arrays, cotangents: Any, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """Transpose a tangent pass: return a dict from operand names to cotangents.

        `cotangents` are the cotangents of the tangent pass's results. `names` are the names of the
        operands whose cotangents are needed.
        """
        if all(isinstance(ct, ad.Zero) for ct in cotangents):
            return {}
        arrays = map(ad.instantiate_zeros, cotangents)
        return dict(zip(names, self.bind(call.backward((*names,)), *residuals, *arrays)))

    def drop_unused(self, used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        """The dead-code elimination rule: remove an unused equation, or its unused results."""
        equation = rest[-1]  # Newer versions of JAX pass one more argument before the equation.
        if not any(used):
            return [False] * len(equation.invars), None
        if all(used):
            return [True] * len(equation.invars), equation
        call: Any = equation.params["call"]
        less, by_name = call.without_unused(used), dict(zip(call.returns, equation.outvars))
        outvars = [by_name[name] for name in less.returns]
        equation = equation.replace(outvars=outvars, params={"call": less})
        return [True] * len(equation.invars), equation

    # ---------------------------------------------------------------------------------- lowering

    def anywhere(self, run: Run, call: Any, *arrays: jax.Array) -> list[jax.Array]:
        """Return ``run(call, *arrays)``, in `jax.shard_map` if the mesh has Explicit axes."""
        whole, shards = functools.partial(run, call), functools.partial(self.shards, call, run)
        return sharding.run(whole, shards, arrays, check_vma=self.check_vma(call))

    def partitioned(self, call: Any) -> Run:
        """Return a function that runs the pass, with a rule for XLA's partitioner.

        If the partitioner shards the arrays, each device runs the pass on its shards.
        """
        shards = functools.partial(self.shards, call, with_wide_types(self.on_shard))
        factors = functools.partial(self.factors, call)
        return auto_axes.partitioned(call, functools.partial(self.plain_jax, call), shards, factors)

    def lower(self, call: Any, ctx: Any, *arrays: Any) -> Any:
        def on_explicit_axes(*arrays: jax.Array) -> list[jax.Array]:
            results = self.anywhere(self.on_shard, call, *arrays)
            return [sharding.lie_as(a, aval) for a, aval in zip(results, ctx.avals_out)]

        is_explicit = sharding.explicit_mesh(ctx.avals_in) is not None
        function = on_explicit_axes if is_explicit else self.lowered(call, ctx)

        def named(*arrays: jax.Array) -> list[jax.Array]:
            with jax.named_scope(ctx.primitive.name):
                return function(*arrays)

        with wide_types_for((*ctx.avals_in, *ctx.avals_out)):
            lower = functools.partial(mlir.lower_fun(named), ctx, *arrays)
            if not isinstance(function, Kernel):
                return lower()
            try:
                with private_jax.without_unfinished_functions(ctx):
                    return lower()
            except Exception as error:
                function.failed(error)
        return self.lower(call, ctx, *arrays)  # without this kernel

    # ------------------------------------------------------------------------------ registration

    def registered(self, function: str, direction: Direction, partitioned: bool) -> Primitive:
        """Return a new primitive for one pass of a public function, with all its rules.

        If `partitioned` is True, the primitive may have a rule for XLA's partitioner.
        """
        name = f"{function}{_SUFFIXES[direction]}"
        primitive = Primitive(f"jaxnorm.{name}")
        primitive.multiple_results = True
        # Cache the results' types, so that identical layers of a model share them.
        primitive.def_abstract_eval(as_jax_calls(functools.lru_cache(maxsize=4096)(self.types)))
        names = as_jax_calls(operator.attrgetter("returns"))
        primitive.def_impl(eager.alone(primitive, as_jax_rule(self.uncompiled), names))
        # Lower out of line, so that identical layers share one lowering: lowering a kernel runs
        # slow Python.
        lower = functools.partial(in_one_chunk, as_jax_calls(self.lower))
        mlir.register_lowering(primitive, lower, inline=False)
        batching.primitive_batchers[primitive] = as_jax_rule(self.batched)
        if direction == "fwd":
            ad.primitive_jvps[primitive] = as_jax_rule(_without_constants(self.forward_jvp))
            remat.register(primitive, self)
        else:
            ad.primitive_jvps[primitive] = as_jax_rule(_without_constants(self.linear_jvp))
            ad.primitive_transposes[primitive] = as_jax_rule(self.transpose)
        partial_eval.dce_rules[primitive] = self.drop_unused
        if partitioned:
            private_jax.needs_devices(primitive)
        private_jax.check_floats(primitive)
        with contextlib.suppress(ImportError, AttributeError):
            # This rule only raises a better error: JAX's own error has just the primitive's name.
            from jax.experimental import jet

            jet.jet_rules[primitive] = functools.partial(_no_taylor_series, name)
        return primitive


def as_jax_calls(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a rule to JAX's interface.

    JAX passes the call, a static parameter of the primitive, by keyword. Our rules take it as their
    first argument.
    """
    return lambda *arguments, **static: rule(*static.values(), *arguments)


def as_jax_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a rule to JAX's interface, as `as_jax_calls` does, and change settings while it runs.

    If an argument has a 64-bit dtype, 64-bit types are enabled. JAX's own checks for NaNs and
    infinities are disabled; `eager.check` checks the results of primitives instead.
    """
    return as_jax_calls(eager.unchecked()(with_wide_types(rule)))


# Names of operands that have no derivative.
_CONSTANTS = {"teacher_logits", "teacher_x", "teacher_weight", "teacher_bias", "where"}


def _without_constants(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a JVP rule so that it ignores the tangents of constants.

    In forward mode with ``jax_remat3``, these tangents are arrays of zeros. The tangent of
    ``logits_scale`` is then 0. If the user differentiates the scale, which has no derivative, this
    tangent is NaN. The returned rule adds it to the tangents of all results, which are then NaN.
    """

    def run(call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
        named = [*zip(call.takes, tangents, strict=True)]
        along_scale = nonzero(item for item in named if item[0] == "logits_scale").values()
        constants = {*_CONSTANTS, "logits_scale"}
        tangents = [zero_like(a) if n in constants else t for a, (n, t) in zip(primals, named)]
        results, along = rule(call, primals, tangents)
        for tangent in along_scale:
            total = jnp.sum(tangent)
            along = [zero_like(a) if t is None else t for a, t in zip(results, along)]
            along = [t + total.astype(t.dtype) for t in map(ad.instantiate_zeros, along)]
        return results, along

    return run


def nonzero(tangents: Iterable[tuple[str, Any]]) -> dict[str, jax.Array]:
    """Return a dict of the named tangents or cotangents, without symbolic zeros and None."""
    return {n: t for n, t in tangents if t is not None and not isinstance(t, ad.Zero)}


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the result of `jax.jvp`. Primals with a symbolic zero tangent are constants."""
    at = [i for i, t in enumerate(tangents) if not isinstance(t, (ad.Zero, SymbolicZero))]

    def function(*arrays: jax.Array) -> Any:
        operands = list(primals)
        for i, a in zip(at, arrays):
            operands[i] = a
        return f(*operands)

    return jax.jvp(function, [primals[i] for i in at], [tangents[i] for i in at])


def zero_like(a: jax.Array) -> ad.Zero:
    """Return the symbolic zero tangent of an array."""
    return ad.Zero(jax.typeof(a).to_tangent_aval())


def batch_first(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """Return `a` with its batch axis `dim` moved to the front.

    If `dim` is None, `a` is broadcast along a new first axis of length `size`.
    """
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


def _no_taylor_series(name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"{name}: jax.experimental.jet has no rule for it; expected jax.jvp, jax.vjp or jax.grad, "
        "which nest to any order; nest jax.jvp for a Taylor series"
    )


def in_one_chunk[T](function: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    """Call a function with a large piece of Python's stack in reserve, which makes lowering faster.

    CPython allocates the frames of functions in chunks of 16 KiB. In Python 3.12, a call whose
    frame does not fit in the current chunk maps a new chunk, and its return unmaps it. A loop of
    such calls takes up to three times as long (https://github.com/python/cpython/issues/142183). A
    frame of more than 16 KiB gets a larger chunk: the frame's size, rounded up to a power of two.
    This function has such a frame, so the frames of the calls in `function` usually fit in the rest
    of its chunk.
    """
    return function(*arguments, **named)


# The frame has 2**17 stack entries of 8 bytes, so it is a little larger than 1 MiB. CPython
# allocates a chunk of memory for it, and rounds the chunk's size up to a power of two, 2 MiB.
# Nearly 1 MiB of this chunk remains for the frames of the functions that are called from here.
in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=2**17)


def wide_types_for(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that enables 64-bit types if one of the arrays has a 64-bit dtype.

    `arrays` may also be abstract values. JAX lowers, differentiates or batches a primitive after it
    was bound. By then, the caller may have left `jax.enable_x64`, and `astype(float64)` would give
    float32.
    """
    if jax.config.jax_enable_x64:
        return contextlib.nullcontext()
    dtypes = [getattr(getattr(a, "aval", a), "dtype", None) for a in arrays]
    is_wide = 8 in [getattr(dtype, "itemsize", 0) for dtype in dtypes]
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def with_wide_types[**P, T](rule: Callable[P, T]) -> Callable[P, T]:
    """Wrap a rule so that 64-bit types are enabled in it if an array has a 64-bit dtype."""

    @functools.wraps(rule)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        with wide_types_for(jax.tree.leaves(arguments, is_leaf=_is_symbolic)):
            return rule(*arguments, **options)

    return run


def _is_symbolic(a: Any) -> bool:
    return isinstance(a, ad.Zero) or ad.is_undefined_primal(a)
