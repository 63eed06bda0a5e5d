"""The JAX primitives of softmaxes, losses and norms, which process the rows of an array.

Each public function has three primitives. For RMSNorm, these are::

    primitive                    operands
    jaxnorm.rms_norm             x, scale
    jaxnorm.rms_norm_tangent     y, rstd, scale | dx, dscale
    jaxnorm.rms_norm_backward    y, rstd, scale | dy

The operands before the bar are the residuals. Here, the output y is saved, so x is not a residual.
The JVP rule of the forward primitive binds the tangent primitive. The tangent and the backward
primitive are linear in the operands after the bar, and each is the transpose of the other. This
gives reverse mode, forward mode and mixtures of both. Second-order derivatives also need the
derivatives of the tangent and the backward pass with respect to the residuals. Plain JAX (the xla
implementation) computes them.

The implementation is chosen when a primitive is lowered, not when a call is traced. During tracing,
the platform is unknown (the program may run on the CPU of a GPU machine, or be lowered for another
machine). It is also unknown how many devices the program uses, and whether it is exported. Because
of this choice at lowering, a machine without a GPU never imports or traces a GPU kernel, and
programs that cannot contain a kernel get plain JAX.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm.calls import backends, private_jax
from jaxnorm.calls.call import Arrays, Call, Run
from jaxnorm.calls.rows import BROADCAST
from jaxnorm.meshes import auto_axes, sharding
from jaxnorm.meshes.sharding import factors_of_rows, shards_of_rows
from jaxnorm.primitives import remat
from jaxnorm.primitives.rules import Kernel, Rules, as_jax_rule, batch_first, nonzero, zero_like
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS, PARAMETERS, SHARED, Kind
from jaxnorm_kernels.specs import Direction

_accumulators = private_jax.accumulators()


class _RowRules(Rules):
    """The JAX rules of softmaxes, losses and norms, which process the rows of an array."""

    # -------------------------------------------------------------------------------- evaluation

    def types(self, call: Call, *avals: Any) -> list[Any]:
        """Return the types of a call's results.

        Arrays with rows are sharded like x, and gradients of parameters like the parameters.
        """
        x, *_ = avals
        mesh, spec, view = sharding.mesh_of(avals), x.sharding.spec, call.view
        types = []
        for name, kind, dtype in zip(call.returns, call.kinds_returned, call.dtypes_returned):
            if kind in PARAMETERS:
                types.append(avals[call.parameters[name]].update(weak_type=False))
                continue
            shape = view.shape_of(kind)
            split = [spec[axis] for axis in view.axes_of(kind)]
            if kind == "candidate":
                split.append(None)
            if kind == "table":
                split = [*split[:-1], None]
            if kind in ("logits_bias", "table"):
                split = [None if size == 1 else over for size, over in zip(shape, split)]
            types.append(sharding.type_like(x, mesh, shape, dtype, split))
        return types

    def plain_jax(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return call.xla(*arrays)

    def on_shard(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return self.bind(call, *arrays)

    def uncompiled(self, call: Call, *arrays: jax.Array) -> list[jax.Array]:
        return self.plain_jax(call, *arrays)  # JAX propagates shardings through plain JAX code

    def lowered(self, call: Call, ctx: Any) -> Run:
        """Return the function to which a call is lowered: a kernel, or plain JAX."""
        platforms = ctx.platforms or ctx.module_context.platforms
        axes = ctx.module_context.axis_context
        whole = auto_axes.are_whole(axes)
        name = "xla" if call.spec.xla_only else _chosen_implementation(ctx, call, platforms)
        if name == "xla":
            # Choose whether plain JAX gets the arrays as they are, or reshaped to two dimensions.
            # On a GPU, XLA fuses more into a softmax of two-dimensional arrays, for example the
            # computation of attention's mask. Arrays stay as they are in a softmax on a CPU, where
            # the reshape would prevent XLA's loops from writing results into the buffers of their
            # operands; in a causal softmax; if they are sharded; if the reshape would need a
            # transpose; or if the call has separate parameters for groups of rows, a logits bias,
            # or rotary tables.
            view, on_cpu = call.view, platforms[0] == "cpu"
            natural = view.moved or view.has_groups or view.logits_bias or view.table
            stays = call.spec.is_softmax and (on_cpu or call.spec.softmax.causal)
            return call.kernel("xla") if whole and not (natural or stays) else call.xla
        if whole:
            call.check_implementation()
            seen = call.as_seen_by(name)
            failed = functools.partial(
                backends.lowering_failed, call.function, call.implementation, name, seen
            )
            return Kernel(call.kernel(name), failed)
        if auto_axes.can_partition(axes):
            return self.partitioned(call)
        if call.implementation is None:
            return call.xla
        raise ValueError(
            f"{call.function}: implementation={name!r} cannot run on arrays that lie on a mesh "
            f"with axes that are neither all manual nor all automatic: {axes}; leave "
            "implementation out, or enter jax.shard_map with all axes of the mesh"
        )

    def needs_shards(self, call: Call) -> bool:
        return backends.has_kernels(call.implementation, backends.local_platform())

    shards, factors = staticmethod(shards_of_rows), staticmethod(factors_of_rows)

    # --------------------------------------------------------------------------- differentiation

    def with_residuals(self, call: Call) -> Call | None:
        # A call whose outputs include the statistics already returns all residuals.
        return None if call.spec.has_stats else call.with_stats()

    names = staticmethod(remat.names)

    def forward_jvp(self, call: Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
        with_stats = call.with_stats()
        outputs = self.bind(with_stats, *primals)
        if not call.spec.has_stats:
            outputs = remat.named(remat.names(with_stats), outputs)
        return self.derived(call, outputs, primals, tangents)

    def derived(self, call: Call, outputs: Arrays, primals: Any, tangents: Any) -> tuple[Any, Any]:
        with_stats, operation = call.with_stats(), call.spec.operation
        arrays = dict(zip(call.primals, primals)) | dict(zip(with_stats.returns, outputs))
        # The saved array must be the operand or result itself: a reshaped or cast copy would take
        # memory too.
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
            tangents_out = [_sum([residual, dy], call.spec.norm.residual_dtype), *others]
        by_name = dict(zip(with_stats.returns, tangents_out))
        results = [arrays[name] for name in call.returns]
        along_results = [by_name[name] for name in call.returns]
        return results, [zero_like(a) if t is None else t for a, t in zip(results, along_results)]

    def transposed_tangent(
        self, call: Call, residuals: Arrays, cotangents: Any, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """Transpose a tangent pass: return a dict from operand names to cotangents.

        `cotangents` are the cotangents of the tangent pass's results. `names` are the names of the
        operands whose cotangents are needed. A returned cotangent of None stands for zero.
        """
        by_name, statistics = dict(zip(call.returns, cotangents)), call.spec.statistics
        nonzeros = nonzero(by_name.items())
        if {*names}.isdisjoint(call.spec.operation.through_h):
            nonzeros.pop("h", None)
        if nonzeros.keys() <= {"h"}:
            return self.gradients_by_h(call, residuals, nonzeros.get("h"), names)
        # The backward pass always takes y's cotangent. It takes the cotangents of h and of the
        # statistics only if they are nonzero.
        absent = {"h"} - nonzeros.keys()
        if nonzeros.keys().isdisjoint(statistics):
            absent.update(statistics)
        outputs = [name for name in call.returns if name not in absent]
        linear = [ad.instantiate_zeros(by_name[name]) for name in outputs]
        return dict(
            zip(names, self.bind(call.backward((*names,), (*outputs,)), *residuals, *linear))
        )

    def gradients_by_h(
        self, call: Call, residuals: Arrays, dh: jax.Array | None, names: Sequence[str]
    ) -> dict[str, jax.Array | None]:
        """Transpose a tangent pass like `transposed_tangent`, but only with h's cotangent, `dh`.

        The cotangents of all other results are zero. If `dh` is None, h's cotangent is zero too.
        """
        by_name: dict[str, jax.Array | None] = dict.fromkeys(names)
        operation = call.spec.operation
        if dh is None:
            return by_name
        if "branch_scale" in operation.operands:
            wrt = [name for name in names if name in operation.through_h]
            results = self.bind(call.backward((*wrt,), ("h",)), *residuals, dh) if wrt else []
            return by_name | dict(zip(wrt, results))
        if operation.starts_from_x:
            arrays, first = dict(zip(call.residual_names, residuals)), call.first()
            arrays["saved"] = arrays["x"]
            inner = [name for name in names if name in ("x", "scale")]
            first_residuals = [arrays[name] for name in first.residual_names]
            results = self.bind(first.backward((*inner,)), *first_residuals, dh) if inner else []
            by_name.update(zip(inner, results))
        elif "x" in names:
            by_name["x"] = dh.astype(call.spec.x_dtype)
        if "residual" in names:
            by_name["residual"] = dh
        return by_name

    def into_accumulators(self, call: Call, cotangents: Any, *operands: Any) -> None:
        """Transpose a norm's tangent pass by adding to JAX's gradient accumulators.

        In ``h = x + r; y = norm(h)``, the norm's operand is h. When the norm is transposed, h's
        accumulator already has the cotangent of the residual branch. The backward kernel takes this
        cotangent as its operand dh, and writes the sum of dh and the norm's own gradient. A
        separate addition would read two arrays of h's size and write one.
        """
        residuals, accumulators = operands[: call.residuals], operands[call.residuals :]
        wanted = {
            n: a for n, a in zip(call.wrt, accumulators) if isinstance(a, _accumulators.GradAccum)
        }
        x: Any = wanted.get("x")
        knows = type(x) is _accumulators.ValAccum and not isinstance(x.val, ad.Zero)
        moves = any(not isinstance(ct, ad.Zero) for ct in cotangents)
        adds = knows and moves and call.spec.operation.may_add_dh and "h" not in call.returns
        # If the user requested an implementation whose kernel cannot add dh, leave the addition to
        # JAX. The call must not fail because of an addition that the user did not request.
        if adds and call.implementation is not None:
            adds = call.backward(call.wrt, ("y", "h")).refusal(call.implementation) is None
        if adds:
            dy, *others = cotangents
            cotangents = [dy, x.val, *others]
            call = call.tangent(call.wrt, takes_h=True)
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
        """Batch a call: it becomes one call of the same operation with more rows.

        The rows of a batch element form a group, and a batched parameter has its own values for
        each group. A backward pass returns separate gradients of a parameter for each batch
        element, even if the parameter is not batched. JAX then sums these gradients.
        """
        size = next(a.shape[dim] for a, dim in zip(arrays, dims) if dim is not None)
        batched = {kind for kind, dim in zip(call.kinds_taken, dims) if dim is not None}
        if call.spec.direction == "bwd":
            batched.update(kind for kind in call.kinds_returned if kind in SHARED)
        view = call.view.batched(size, batched)
        if call.spec.is_norm and "array" not in batched:
            call = call.replaced(repeated=True)
        if call.spec.direction == "fwd" and "scale" in batched and "next_scale" in call.primals:
            by_name = dict(zip(call.primals, arrays))
            for name, dim in zip(call.primals, dims):
                if dim is None and name in call.parameters:  # will be broadcast over the batch
                    call, by_name[name] = call.widened(name, by_name[name])
            arrays = list(by_name.values())

        def with_batch_axis(a: jax.Array, dim: int | None, kind: Kind) -> jax.Array:
            is_whole = dim is None and kind not in batched
            if is_whole and kind in PARAMETERS:
                return a
            a = a[None] if is_whole and kind in BROADCAST else batch_first(a, dim, size)
            return jnp.expand_dims(a, range(1, 1 + len(view.shape_of(kind)) - a.ndim))

        operands, shape_of = (
            map(with_batch_axis, arrays, dims, call.kinds_taken),
            call.view.shape_of,
        )
        call = call.with_view(view)
        asked = call.implementation
        if asked is not None and call.spec.is_norm and call.as_seen_by(asked).norm.scattered:
            call = call.replaced(implementation="xla")  # no kernel can use the parameters
        results = [
            jnp.squeeze(a, tuple(range(1, a.ndim - len(shape_of(kind)))))
            for kind, a in zip(call.kinds_returned, self.bind(call, *operands))
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


def _chosen_implementation(ctx: Any, call: Call, platforms: Sequence[str]) -> str:
    """Return the name of the implementation to use for a call that kernels may support."""
    if call.implementation is not None:
        backends.check_platforms(call.function, call.implementation, platforms)
        return call.implementation
    if ctx.module_context.lowering_parameters.for_export or len(platforms) > 1:
        return "xla"  # exported programs must run with later versions too
    return backends.choose(call.as_seen_by, platforms[0]).name


def _sum(terms: Sequence[jax.Array | None], dtype: Any) -> jax.Array:
    """Return the sum of the terms that are not None, rounded once to `dtype`.

    At least one term must not be None.
    """
    arrays: Sequence[jax.Array] = [a for a in terms if a is not None]
    wide = functools.reduce(jnp.promote_types, [a.dtype for a in arrays])
    arrays = sharding.vary_alike([a.astype(wide) for a in arrays])
    return functools.reduce(jnp.add, arrays).astype(dtype)


_RULES = _RowRules()
bind, tangents_of = _RULES.bind, _RULES.tangents_of


def run(call: Call, *arrays: jax.Array | None) -> list[jax.Array]:
    """Run a call of a public function and return its results.

    ValueError is raised if the user requested an implementation that cannot run the call.
    """
    call.check_implementation()
    return bind(call, *arrays)
