"""Names of the residuals, the policy that saves them, and JAX's two kinds of rematerialisation.

JAX has two implementations of `jax.checkpoint`. The present one differentiates a block first, and
asks the policy about the names in the derivative: the names that our JVP rules give suffice.

The next one (``jax_remat3``) asks the policy while it evaluates the block, before any JVP rule has
run, and sees no name in a rule. For it, each forward primitive has a rule of rematerialisation:

    forward     call(*primals)       binds the call with its residuals, names them, and saves those
                                     that the policy accepts
    backward    restored(*primals)   has their values, and the derivative of the call, which starts
                                     from the saved residuals
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm.calls import private_jax
from jaxnorm.calls.call import Call
from jaxnorm_kernels.operations import OPERATIONS

_PREACTIVATION = "jaxnorm_preactivation"

# Of norms and of what is a number for each row: not of softmaxes, as large as attention's matrix.
_KEPT = sorted(
    {
        name
        for operation in OPERATIONS.values()
        for name in (operation.statistics_name, operation.out_name)
        if name is not None and (operation.family == "norm" or name != operation.out_name)
    }
)

#: Policy for :func:`jax.checkpoint`: norms are kept, and everything else is recomputed.
#:
#: ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` keeps the outputs and statistics of the
#: norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward computes no norm again, and
#: the log-sum-exp of each row of a loss (``jaxnorm_lse``: two numbers, and results that a
#: derivative takes), not its logits. A softmax's output, as large as the attention matrix, has a
#: name of its own (``jaxnorm_softmax_out``), and is not kept; nor is what ``rms_norm_linear``
#: gives to an activation (``jaxnorm_preactivation``), a product's result. To keep them, or arrays
#: with names of your own, too, use :func:`jax.checkpoint_policies.save_only_these_names` with all
#: of the names, or :func:`jax.checkpoint_policies.save_from_both_policies`.
#:
#: It is what ``save_only_these_names`` returns: a function, or data in a JAX whose policies are
#: that. So hand it to JAX, and do not call it.
save_policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def names(call: Call) -> list[str | None]:
    """Return the name of each result of a call, or None: statistics, and outputs of norms.

    Results that are numbers of a row, which may be factors of a derivative, are as cheap to save as
    statistics. h has a name only where the backward starts from it: else its sum costs less to
    recompute than to save. A call that another function makes (rms_norm_linear) does not return its
    y, and names its statistics only.
    """
    operation = call.spec.operation
    by_result = {"y": operation.out_name} if call.primitives is None else {}
    of_rows = [result for result, kind in operation.results.items() if kind == "stat"]
    by_result |= dict.fromkeys((*call.spec.statistics, *of_rows), operation.statistics_name)
    if call.spec.starts_from == "h":
        by_result["h"] = operation.out_name
    return [by_result.get(result) for result in call.returns]


def named(
    names: Sequence[str | None],
    arrays: Sequence[jax.Array],
    name: Callable[[jax.Array, str], jax.Array] = checkpoint_name,
) -> list[jax.Array]:
    """Give each array its name, for policies of `jax.checkpoint`; None for no name."""
    return [a if n is None else name(a, n) for n, a in zip(names, arrays, strict=True)]


def name_of_linear(result: str, a: jax.Array) -> jax.Array:
    """Name z of rms_norm_linear, what its activation is applied to, or the sum h."""
    names = {"h": OPERATIONS["norm"].out_name, "z": _PREACTIVATION}
    return checkpoint_name(a, names[result])


# ----------------------------------------------------------------------------- jax_remat3


class Family[P](Protocol):
    """The forward calls of a family of functions, as rematerialisation needs them."""

    def bind(self, call: P, *arrays: jax.Array | None) -> list[jax.Array]: ...

    def types(self, call: P, *avals: Any) -> list[Any]: ...

    def with_residuals(self, call: P) -> P | None:
        """The call that also returns its residuals; None if no policy can save any."""

    def names(self, call: P) -> Sequence[str | None]:
        """The names of the outputs of a call with residuals."""

    def results(self, call: P, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Pick the results of a call from the outputs of the call with residuals."""

    def derived(
        self, call: P, outputs: Sequence[jax.Array], primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        """The results of a call and their tangents, which start from the residuals in `outputs`."""


def register[P](primitive: Primitive, family: Family[P]) -> None:
    """Let policies save the named outputs of a forward primitive under ``jax_remat3``."""
    private = private_jax.remat3()
    if private is None:
        return
    rules, transform, name = private

    def rule(trace: Any, *primals: Any, **static: P) -> tuple[list[jax.Array], Any, Any]:
        """Return the results, what the policy saves, and a function of it and of the primals."""
        (call,) = static.values()
        recompute = functools.partial(family.bind, call)
        if (full := family.with_residuals(call)) is None:
            return recompute(*primals), (), lambda _, *primals: recompute(*primals)
        # Saved arrays stand for themselves: their derivative of second order is the forward's.
        with_names = functools.partial(named, family.names(full), name=name)
        apply = functools.partial(
            transform, trace.policy, with_names, custom_vjp_rules=trace.custom_vjp_rules
        )
        types = family.types(full, *map(jax.typeof, primals))
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
        if not jax.tree.leaves(jax.eval_shape(apply, shapes)[1]):  # Nothing is saved.
            return recompute(*primals), (), lambda _, *primals: recompute(*primals)
        outputs, saved = apply(family.bind(full, *primals))

        def restored(saved: Callable[..., list[jax.Array]], *primals: Any) -> list[jax.Array]:
            return _restored(family, call, saved(family.bind(full, *primals)), *primals)

        return family.results(call, outputs), saved, restored

    rules[primitive] = rule


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _restored(
    family: Family[Any], call: Any, outputs: Sequence[jax.Array], *primals: jax.Array
) -> list[jax.Array]:
    """Return the results of a call whose outputs are given, with the derivative of the call."""
    del primals
    return family.results(call, outputs)


@functools.partial(_restored.defjvp, symbolic_zeros=True)
def _(family: Family[Any], call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (outputs, *primals), (_, *tangents) = primals, tangents
    tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
    results, tangents = family.derived(call, outputs, primals, tangents)
    return results, [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents]
