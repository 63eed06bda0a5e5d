"""The operations as JAX primitives: a forward, a tangent and a backward one for each function.

    jaxnorm.rms_norm             x, scale                        its JVP rule binds, on what is
    jaxnorm.rms_norm_tangent     y, rstd, scale | dx, dscale     saved, the tangent, whose
    jaxnorm.rms_norm_backward    y, rstd, scale | dy             transpose is the backward

So reverse mode, forward mode and their mixtures follow, under every transformation, and x is never
among what is saved from the output. The tangent and the backward are linear in what follows the
bar, and each other's transpose; their derivatives along what precedes it, which second order needs,
are those of the xla implementation.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm.calls import backends
from jaxnorm.calls.call import Arrays, Call, Run
from jaxnorm.calls.rows import BROADCAST
from jaxnorm.meshes import sharding
from jaxnorm.meshes.shards import factors_of_rows, shards_of_rows
from jaxnorm.primitives import lowering, remat
from jaxnorm.primitives.rules import Rules, as_jax_rule, batch_first, nonzero, zero_like
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, PARAMETERS, SHARED, Kind
from jaxnorm_kernels.specs import Direction


def _with_accumulators() -> Any:
    """JAX's private module, if its backward passes hand their accumulators to transposes.

    Without it nothing breaks: the residual's gradient is then added outside the kernel.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad as private

        if all(hasattr(private, n) for n in ("fancy_transposes", "GradAccum", "ValAccum")):
            return private
    return None


_accumulators = _with_accumulators()


class _RowRules(Rules[Call]):
    """What row operations have for themselves."""

    # -------------------------------------------------------------------------------- evaluation

    def types(self, call: Call, *avals: Any) -> list[Any]:
        """Types of the results: rows lie as x does, and a parameter's gradient as the parameter."""
        x, *_ = avals
        mesh, spec, view = sharding.mesh_of(avals), x.sharding.spec, call.view
        types = []
        for name, kind, dtype in zip(call.result_names, call.result_kinds, call.result_dtypes):
            if kind in PARAMETERS:
                types.append(avals[call.parameters[name]].update(weak_type=False))
                continue
            shape = view.shape_of(kind)
            split = [spec[axis] for axis in view.axes_of(kind)]
            if kind == "table":
                split = [*split[:-1], None]
            if kind in ("logits_bias", "table"):
                split = [None if size == 1 else over for size, over in zip(shape, split)]
            types.append(sharding.type_like(x, mesh, shape, dtype, split))
        return types

    def plain(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return call.xla(*arrays)

    def on_shard(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return self.bind(call, *arrays)

    def uncompiled(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return self.plain(call, *arrays)  # of which JAX knows what becomes of shardings

    def lowered(self, call: Call, ctx: Any) -> Run:
        return lowering.choose(ctx, call, self.bind, self.partitioned)

    def needs_shards(self, call: Call) -> bool:
        return backends.has_kernels(call.implementation, backends.local_platform())

    shards, factors = staticmethod(shards_of_rows), staticmethod(factors_of_rows)

    # --------------------------------------------------------------------------- differentiation

    def with_residuals(self, call: Call) -> Call | None:
        # A call that has statistics is one that a derivative has made.
        return None if call.spec.want_stats else call.with_stats()

    names = staticmethod(remat.names)

    def forward_jvp(self, call: Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
        with_stats = call.with_stats()
        outputs = self.bind(with_stats, *primals)
        if not call.spec.want_stats:
            outputs = remat.named(remat.names(with_stats), outputs)
        return self.derived(call, outputs, primals, tangents)

    def derived(self, call: Call, outputs: Arrays, primals: Any, tangents: Any) -> tuple[Any, Any]:
        with_stats, operation = call.with_stats(), call.spec.operation
        arrays = dict(zip(call.primals, primals)) | dict(zip(with_stats.result_names, outputs))
        # The very array that is returned: a reshaped or cast copy would be stored a second time.
        arrays["saved"] = arrays[call.spec.starts_from]
        tangent_of = dict(zip(call.primals, tangents))
        nonzeros = nonzero([(name, tangent_of[name]) for name in call.differentiable])
        if operation.derivative is None:
            tangents_out = self.tangents_of(
                call, [arrays[name] for name in call.residual_names], nonzeros
            )
        else:  # y = residual + norm(x)
            residual, norm = nonzeros.pop("residual", None), call.first()
            residuals = [arrays[name] for name in norm.residual_names]
            dy, *others = self.tangents_of(norm, residuals, nonzeros)
            tangents_out = [_sum([residual, dy], call.spec.residual_dtype), *others]
        by_name = dict(zip(with_stats.result_names, tangents_out))
        results = [arrays[name] for name in call.result_names]
        along_results = [by_name[name] for name in call.result_names]
        return results, [zero_like(a) if t is None else t for a, t in zip(results, along_results)]

    def transposed_tangent(
        self, call: Call, residuals: Arrays, cotangents: Any, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """The cotangents of the tangents `names`, from those of a tangent's results."""
        by_name = dict(zip(call.result_names, cotangents))
        dh = by_name.pop("h", None)
        if isinstance(dh, ad.Zero) or not {*call.spec.operation.through_h} & {*names}:
            dh = None
        nonzeros = nonzero(by_name.items())
        if not nonzeros:
            return self.gradients_by_h(call, residuals, dh, names)
        stat_cotangents = not nonzeros.keys().isdisjoint(call.spec.statistics)
        backward = call.backward(names, adds_dh=dh is not None, stat_cotangents=stat_cotangents)
        by_name["h"] = dh
        linear = [by_name[name] for name in backward.operand_names[call.residuals :]]
        results = self.bind(backward, *residuals, *map(ad.instantiate_zeros, linear))
        return dict(zip(names, results))

    def gradients_by_h(
        self, call: Call, residuals: Arrays, dh: jax.Array | None, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """`transposed_tangent` where y is not used."""
        by_name: dict[str, jax.Array | None] = dict.fromkeys(names)
        operation = call.spec.operation
        if dh is None:
            return by_name
        if "branch_scale" in operation.operands:
            wrt = [name for name in names if name in operation.through_h]
            results = self.bind(call.backward_of_h(wrt), *residuals, dh) if wrt else []
            return by_name | dict(zip(wrt, results))
        if operation.starts_from_x:
            arrays, first = dict(zip(call.residual_names, residuals)), call.first()
            arrays["saved"] = arrays["x"]
            inner = [name for name in names if name in ("x", "scale")]
            of_first = [arrays[name] for name in first.residual_names]
            results = self.bind(first.backward(inner), *of_first, dh) if inner else []
            by_name.update(zip(inner, results))
        elif "x" in names:
            by_name["x"] = dh.astype(call.spec.x_dtype)
        if "residual" in names:
            by_name["residual"] = dh
        return by_name

    def into_accumulators(self, call: Call, cotangents: Any, *operands: Any) -> None:
        """The transpose of a norm's tangent, for a backward pass that hands out its accumulators.

        In ``h = x + r; y = norm(h)`` what the residual branch gives the cotangent of h is in its
        accumulator by now. The backward takes it as dh and writes the sum, which else were another
        pass over three arrays of this size.
        """
        residuals, accumulators = operands[: call.residuals], operands[call.residuals :]
        wanted = {
            n: a for n, a in zip(call.wrt, accumulators) if isinstance(a, _accumulators.GradAccum)
        }
        x: Any = wanted.get("x")
        knows = type(x) is _accumulators.ValAccum and not isinstance(x.val, ad.Zero)
        moves = any(not isinstance(ct, ad.Zero) for ct in cotangents)
        adds = knows and moves and call.spec.operation.may_add_dh and not call.spec.adds_dh
        if adds:
            dy, *others = cotangents
            cotangents = [dy, x.val, *others]
            call = call.tangent(call.wrt, adds_dh=True)
        results = self.transposed_tangent(call, residuals, cotangents, [*wanted])
        for name, accumulator in wanted.items():
            if adds and name == "x":
                accumulator.val = results[name]
            else:
                accumulator.accum(results[name])

    # ---------------------------------------------------------------------------------- batching

    def batch(
        self, call: Call, arrays: Arrays, dims: Sequence[int | None]
    ) -> tuple[Arrays, list[int]]:
        """A batch of rows is more rows; a batch of parameters, or of their gradients, is groups.

        So the pass stays what it is, and a gradient taken outside `jax.vmap` finds the same
        backward.
        """
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
        batched = {kind for kind, dim in zip(call.operand_kinds, dims) if dim is not None}
        if call.spec.direction == "bwd":
            batched.update(kind for kind in call.result_kinds if kind in SHARED)
        view = call.view.batched(size, batched)
        if call.spec.direction == "fwd" and "scale" in batched and "next_scale" in call.primals:
            by_name = dict(zip(call.primals, arrays))
            for name, dim in zip(call.primals, dims):
                if dim is None and name in call.parameters:  # It gets the other scale's batch axis.
                    call, by_name[name] = call.widened(name, by_name[name])
            arrays = list(by_name.values())

        def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
            is_whole = dim is None and kind not in batched
            if is_whole and kind in PARAMETERS:
                return a
            a = a[None] if is_whole and kind in BROADCAST else batch_first(a, dim, size)
            return jnp.expand_dims(a, range(1, 1 + len(view.shape_of(kind)) - a.ndim))

        operands = map(with_batch_axis, arrays, dims, call.operand_kinds)
        results = [
            jnp.squeeze(a, tuple(range(1, a.ndim - len(call.view.shape_of(kind)))))
            for kind, a in zip(call.result_kinds, self.bind(call.on(view), *operands))
        ]
        return results, [0] * len(results)

    # ------------------------------------------------------------------------------ registration

    def registered(self, function: str, direction: Direction, partitioned: bool) -> Primitive:
        primitive = super().registered(function, direction, partitioned)
        is_norm = OPERATIONS[FUNCTIONS[function].op].family == "norm"
        if _accumulators is not None and direction == "tan" and is_norm:
            rule = as_jax_rule(self.into_accumulators)
            _accumulators.fancy_transposes[primitive] = rule
        return primitive


def _sum(terms: Sequence[jax.Array | None], dtype: Any) -> jax.Array | None:
    """The sum in `dtype`, rounded once, of those that are not None; None for that of none."""
    arrays: Sequence[jax.Array] = [a for a in terms if a is not None]
    if not arrays:
        return None
    wide = functools.reduce(jnp.promote_types, [a.dtype for a in arrays])
    arrays = sharding.vary_alike([a.astype(wide) for a in arrays])
    return functools.reduce(jnp.add, arrays).astype(dtype)


_RULES = _RowRules()
bind, tangents_of = _RULES.bind, _RULES.tangents_of


def run(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """The results of a user's call: refused here, where an implementation's name cannot run it."""
    if call.implementation is not None:
        backends.forced(call, call.implementation)
    return bind(call, *arrays)
