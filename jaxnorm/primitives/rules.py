"""The rules by which JAX differentiates, batches and lowers the passes of a call, once for all.

A call has a forward, a tangent and a backward pass, and each is a JAX primitive. Tangent and
backward are linear in what follows the residuals, and each other's transpose; their derivatives
along the residuals, which second order needs, are those of plain JAX.
"""

import abc
import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxnorm.calls import private_jax
from jaxnorm.calls.call import Arrays, Run
from jaxnorm.meshes import auto_axes, sharding
from jaxnorm.meshes.shards import Factors, Shards
from jaxnorm.primitives import eager, remat
from jaxnorm_kernels.specs import Direction

_SUFFIXES = {"fwd": "", "tan": "_tangent", "bwd": "_backward"}


class Pass(Protocol):
    """The static part of a pass; that of a row operation is a `jaxnorm.calls.call.Call`."""

    @property
    def direction(self) -> Direction: ...

    @property
    def function(self) -> str: ...

    @property
    def primitives(self) -> str | None:
        """Whose it binds, where those are another function's."""

    @property
    def wrt(self) -> tuple[str, ...]:
        """Names of the primals that have a tangent or, in ``bwd``, a gradient."""

    @property
    def residuals(self) -> int:
        """How many of the operands of ``tan`` and ``bwd`` are residuals."""

    @property
    def takes(self) -> tuple[str, ...]:
        """In a ``bwd`` a cotangent has the name of the result that it is of."""

    @property
    def returns(self) -> tuple[str, ...]: ...

    def tangent(self, wrt: Sequence[str]) -> Self: ...

    def backward(self, wrt: Sequence[str]) -> Self: ...

    def without_unused(self, used: Sequence[bool]) -> Self:
        """The pass without results that it need not make, where some are not `used`."""


class Rules[P: Pass](abc.ABC):
    """The rules of a family of calls, whose static part is a P.

    Attributes:
      static: what jaxprs call the static part.
    """

    static = "call"

    def __init__(self) -> None:
        self.primitive = functools.cache(self.registered)

    # ------------------------------------------------------------------------ what a family says

    @abc.abstractmethod
    def types(self, call: P, *avals: Any) -> list[Any]:
        """Types of the results, by those of the operands."""

    @abc.abstractmethod
    def plain(self, call: P, /, *arrays: jax.Array) -> list[jax.Array]:
        """The results, in plain JAX."""

    @abc.abstractmethod
    def on_shard(self, call: P, /, *arrays: jax.Array) -> list[jax.Array]:
        """The results, where a device has its shards."""

    @abc.abstractmethod
    def forward_jvp(self, call: P, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The rule of differentiation of a forward."""

    @abc.abstractmethod
    def with_residuals(self, call: P) -> P | None:
        """The forward that also returns its residuals; None if no policy can save any."""

    @abc.abstractmethod
    def names(self, call: P) -> Sequence[str | None]:
        """Names of the outputs of a forward with residuals, for policies of rematerialisation."""

    @abc.abstractmethod
    def derived(self, call: P, outputs: Arrays, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The results of a forward and their tangents, which start from residuals in `outputs`."""

    @abc.abstractmethod
    def batch(
        self, call: P, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[Arrays, list[int]]:
        """The rule of `jax.vmap`."""

    @abc.abstractmethod
    def shards(self, call: P, run: Run, types: Sequence[Any], mesh: Any) -> Shards:
        """Those of arrays of these types; ``run(call, *arrays)`` makes a pass on a device's."""

    @abc.abstractmethod
    def factors(self, call: P, arrays: Arrays) -> Factors:
        """How shardings spread from one array to another."""

    def results(self, call: P, outputs: Arrays) -> list[jax.Array]:
        """Pick the results of a forward from the outputs of the forward with residuals."""
        by_name = dict(zip((self.with_residuals(call) or call).returns, outputs))
        return [by_name[name] for name in call.returns]

    def differentiated(self, call: P, /, *arrays: jax.Array) -> list[jax.Array]:
        """`plain`, for derivatives of second order."""
        return self.plain(call, *arrays)

    def uncompiled(self, call: P, *arrays: jax.Array) -> list[jax.Array]:
        """The results where JAX compiles nothing (`jax.disable_jit`)."""
        return self.anywhere(self.on_shard, call, *arrays)

    def lowered(self, call: P, ctx: Any) -> Run:
        """What a pass becomes, where there are no Explicit axes."""
        axes = ctx.module_context.axis_context
        if auto_axes.can_partition(axes) and not auto_axes.are_whole(axes):
            return self.partitioned(call)
        return functools.partial(self.plain, call)

    def needs_shards(self, call: P) -> bool:
        """Whether its code is none, or may be none, that XLA spreads over devices by itself."""
        return True

    # ---------------------------------------------------------------------------------- the call

    def bind(self, call: P, *arrays: jax.Array | None) -> list[jax.Array]:
        """The results of the pass; None stands for an array that there is not."""
        function, direction = call.primitives or call.function, call.direction
        leaves = [a for a in arrays if a is not None]
        primitive = self.primitive(function, direction, self._may_be_partitioned(call, leaves))
        operands = sharding.vary_alike(leaves)
        results: list[jax.Array] = primitive.bind(*operands, **{self.static: call})
        return results

    def _may_be_partitioned(self, call: P, arrays: Arrays) -> bool:
        """Whether XLA's partitioner may have to ask what to do with the shards of arrays.

        For that JAX has to know the devices when it lowers, which programs without any (for an
        `AbstractMesh`) and with several meshes cannot say. So it is asked for no more than it must.
        """
        return (
            jax.device_count() > 1
            and sharding.explicit_mesh([*map(jax.typeof, arrays)]) is None
            and self.needs_shards(call)
        )

    # --------------------------------------------------------------------------- differentiation

    def linear_jvp(self, call: P, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The rule of a tangent or a backward."""
        count = call.residuals
        if any(not isinstance(t, ad.Zero) for t in tangents[:count]):
            return self.second_order(call, primals, tangents)
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return self.bind(call, *primals), self.bind(call, *primals[:count], *linear)

    def second_order(self, call: P, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The results of a pass, and the tangents that those of plain JAX have."""
        at = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

        def function(*arrays: jax.Array) -> list[jax.Array]:
            operands = list(primals)
            for i, a in zip(at, arrays):
                operands[i] = a
            return self.anywhere(self.differentiated, call, *operands)

        results = self.bind(call, *primals)
        with wide_types_for((*primals, *results)):
            _, tangents_out = jax.jvp(function, [primals[i] for i in at], [tangents[i] for i in at])
        return results, tangents_out

    def tangents_of(
        self, call: P, residuals: Arrays, tangents: dict[str, Any]
    ) -> list[jax.Array | None]:
        """What the tangent of a call returns; None for a tangent of 0, among `tangents`, too."""
        nonzeros = nonzero(tangents.items())
        tangent = call.tangent([*nonzeros])
        if not nonzeros:
            return [None] * len(tangent.returns)
        return [*self.bind(tangent, *residuals, *nonzeros.values())]

    def transpose(self, call: P, cotangents: Any, *operands: Any) -> list[Any]:
        """The rule of a tangent or a backward: each is the other's transpose."""
        residuals, linear = operands[: call.residuals], operands[call.residuals :]
        names = call.takes[call.residuals :]
        wanted = [name for name, a in zip(names, linear) if ad.is_undefined_primal(a)]
        if call.direction == "tan":
            by_name = self.transposed_tangent(call, residuals, cotangents, wanted)
        else:
            nonzeros = nonzero(zip(call.wrt, cotangents))
            tangent = call.tangent([*nonzeros])
            results = self.bind(tangent, *residuals, *nonzeros.values())
            by_name = dict(zip(tangent.returns, results))
        of_linear = [by_name.get(name) if name in wanted else None for name in names]
        return [None] * len(residuals) + of_linear

    def transposed_tangent(
        self, call: P, residuals: Arrays, cotangents: Any, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """The cotangents of the tangents `names`, from those of a tangent's results."""
        if all(isinstance(ct, ad.Zero) for ct in cotangents):
            return {}
        arrays = map(ad.instantiate_zeros, cotangents)
        return dict(zip(names, self.bind(call.backward(names), *residuals, *arrays)))

    def drop_unused(self, used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        """What is not used goes: a call, or some of its results."""
        equation = rest[-1]  # Newer versions of JAX say in between which inputs are live.
        if not any(used):
            return [False] * len(equation.invars), None
        if all(used):
            return [True] * len(equation.invars), equation
        call: P = equation.params[self.static]
        less, by_name = call.without_unused(used), dict(zip(call.returns, equation.outvars))
        outvars = [by_name[name] for name in less.returns]
        equation = equation.replace(outvars=outvars, params={self.static: less})
        return [True] * len(equation.invars), equation

    # ---------------------------------------------------------------------------------- lowering

    def anywhere(self, run: Run, call: P, *arrays: jax.Array) -> list[jax.Array]:
        """``run(call, *arrays)``, on shards where a mesh has Explicit axes."""
        whole, shards = functools.partial(run, call), functools.partial(self.shards, call, run)
        return sharding.run(whole, shards, arrays)

    def partitioned(self, call: P) -> Run:
        """The pass on the shards that XLA's partitioner has in hand."""
        shards = functools.partial(self.shards, call, with_wide_types(self.on_shard))
        factors = functools.partial(self.factors, call)
        return auto_axes.partitioned(call, functools.partial(self.plain, call), shards, factors)

    def lower(self, call: P, ctx: Any, *arrays: Any) -> Any:
        def on_explicit_axes(*arrays: jax.Array) -> list[jax.Array]:
            results = self.anywhere(self.on_shard, call, *arrays)
            return [sharding.lie_as(a, aval) for a, aval in zip(results, ctx.avals_out)]

        is_explicit = sharding.explicit_mesh(ctx.avals_in) is not None
        function = on_explicit_axes if is_explicit else self.lowered(call, ctx)

        def named(*arrays: jax.Array) -> list[jax.Array]:
            with jax.named_scope(ctx.primitive.name):
                return function(*arrays)

        with wide_types_for((*ctx.avals_in, *ctx.avals_out)):
            return mlir.lower_fun(named)(ctx, *arrays)

    # ------------------------------------------------------------------------------ registration

    def registered(self, function: str, direction: Direction, partitioned: bool) -> Primitive:
        """A primitive, its rules in all tables where JAX looks for them.

        `partitioned`: that of calls for which `_may_be_partitioned`.
        """
        name = f"{function}{_SUFFIXES[direction]}"
        primitive = Primitive(f"jaxnorm.{name}")
        primitive.multiple_results = True
        # Once for all layers of a model.
        primitive.def_abstract_eval(as_jax_calls(functools.lru_cache(maxsize=4096)(self.types)))
        names = as_jax_calls(operator.attrgetter("returns"))
        primitive.def_impl(eager.alone(primitive, as_jax_rule(self.uncompiled), names))
        # Lower out of line, so that identical layers share one lowering: lowering a kernel runs
        # slow Python.
        lower = functools.partial(in_one_chunk, as_jax_calls(self.lower))
        mlir.register_lowering(primitive, lower, inline=False)
        batching.primitive_batchers[primitive] = as_jax_rule(self.batch)
        if direction == "fwd":
            ad.primitive_jvps[primitive] = as_jax_rule(self.forward_jvp)
            remat.register(primitive, self)
        else:
            ad.primitive_jvps[primitive] = as_jax_rule(self.linear_jvp)
            ad.primitive_transposes[primitive] = as_jax_rule(self.transpose)
        partial_eval.dce_rules[primitive] = self.drop_unused
        if partitioned:
            private_jax.needs_devices(primitive)
        private_jax.check_floats(primitive)
        with contextlib.suppress(ImportError, AttributeError):
            # Without it nothing breaks, but the error says no more than the primitive's name.
            from jax.experimental import jet

            jet.jet_rules[primitive] = functools.partial(_no_taylor_series, name)
        return primitive


def as_jax_calls(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule as JAX calls it: the static part, which it takes first, is a keyword there."""
    return lambda *arguments, **static: rule(*static.values(), *arguments)


def as_jax_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a rule as `as_jax_calls` does; it runs with 64-bit types if an array has them."""
    return as_jax_calls(with_wide_types(rule))


def nonzero(tangents: Iterable[tuple[str, Any]]) -> dict[str, jax.Array]:
    """Those of tangents, or of cotangents, that are not 0, for which None may stand, too."""
    return {n: t for n, t in tangents if t is not None and not isinstance(t, ad.Zero)}


def zero_like(a: jax.Array) -> ad.Zero:
    """The tangent 0 of an array."""
    return ad.Zero(jax.typeof(a).to_tangent_aval())


def batch_first(a: jax.Array, dim: int | None, size: int) -> jax.Array:
    """An array with its batch axis first; one that it has not (None) is made, of this size."""
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


def _no_taylor_series(name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"{name}: jax.experimental.jet has no rule for it; expected jax.jvp, jax.vjp or jax.grad, "
        "which nest to any order; nest jax.jvp for a Taylor series"
    )


def in_one_chunk[T](function: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    """Call a function where Python's stack has room for all that it calls.

    That stack is chunks of 16 KiB. In Python 3.12 a call that takes a new chunk maps its memory,
    and the return from it unmaps it again: where a loop deep in a trace makes such calls, it takes
    up to three times as long (https://github.com/python/cpython/issues/142183). A frame larger than
    a chunk gets one of its own size, up to the next power of two.
    """
    return function(*arguments, **named)


# A frame of 1 MiB, which it does not fill: the next power of two leaves as much for what it calls.
in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=2**17)


def wide_types_for(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Turn 64-bit types on if one of the arrays, or of their types, has 64 bits.

    JAX runs a rule later than the call: when it lowers, differentiates or batches. By then the
    caller may have left `jax.enable_x64`, and `astype(float64)` would give float32.
    """
    if jax.config.jax_enable_x64 or not any(map(_is_wide, arrays)):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def with_wide_types[**P, T](rule: Callable[P, T]) -> Callable[P, T]:
    """Wrap a rule so that it runs with the types of its arguments: arrays and sequences of them."""

    @functools.wraps(rule)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        with wide_types_for(jax.tree.leaves(arguments, is_leaf=_is_symbolic)):
            return rule(*arguments, **options)

    return run


def _is_symbolic(a: Any) -> bool:
    return isinstance(a, ad.Zero) or ad.is_undefined_primal(a)


def _is_wide(a: Any) -> bool:
    dtype = getattr(getattr(a, "aval", a), "dtype", None)
    return getattr(dtype, "itemsize", 0) == 8
