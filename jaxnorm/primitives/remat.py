"""Names of the residuals, the policy that saves them, and JAX's two kinds of rematerialisation.

JAX has two implementations of `jax.checkpoint`. The present one differentiates a block first, and
applies the policy to the names in the derivative. The names in our JVP rules are enough for it.

The next one (``jax_remat3``) applies the policy while it evaluates the block, before any JVP rule
runs, so that it sees no names in JVP rules. Each forward primitive has a rematerialisation rule:

    forward     call(*primals)       binds the call with its residuals, names them, and saves those
                                     that the policy accepts
    backward    restored(*primals)   returns the results; their derivative is that of the call, and
                                     starts from the saved residuals
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm.calls import private_jax
from jaxnorm.calls.call import Call
from jaxnorm_kernels.operations import OPERATIONS

_PREACTIVATION = "jaxnorm_preactivation"

# Names of norms' outputs and of row statistics, without the outputs of softmaxes, which are as
# large as the attention matrix.
_KEPT = sorted(
    {
        name
        for operation in OPERATIONS.values()
        for name in (operation.statistics_name, operation.out_name)
        if name is not None and (operation.family == "norm" or name != operation.out_name)
    }
)

#: Policy for :func:`jax.checkpoint` that saves norms and recomputes everything else.
#:
#: ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` saves the outputs and statistics of the
#: norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward pass recomputes no norm. It
#: also saves the log-sum-exp of each row of a loss (``jaxnorm_lse``: two numbers, and results that
#: a derivative takes), but not the logits. Two named arrays are not saved: a softmax's output, as
#: large as the attention matrix (``jaxnorm_softmax_out``), and the matmul's result to which
#: ``rms_norm_linear`` applies an activation (``jaxnorm_preactivation``). To save these, or arrays
#: with names of your own, use :func:`jax.checkpoint_policies.save_only_these_names` with all of the
#: names, or :func:`jax.checkpoint_policies.save_from_both_policies`.
#:
#: The policy is the return value of ``save_only_these_names``: a function or, depending on the
#: version of JAX, data. Pass it to JAX, and do not call it.
save_policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def names(call: Call) -> list[str | None]:
    """Return, for each result of a call, its name for policies, or None if it has no name.

    Outputs of norms and results with one number per row have names. The latter may be factors of a
    derivative, and are as cheap to save as statistics. h has a name only if the backward pass
    starts from it. Otherwise, recomputing its sum is cheaper than saving it. A call inside another
    function (rms_norm_linear) names its statistics only, since its y is not returned.
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
    """Name arrays for policies of `jax.checkpoint`; a name of None leaves an array unnamed."""
    return [a if n is None else name(a, n) for n, a in zip(names, arrays, strict=True)]


def name_of_linear(result: str, a: jax.Array) -> jax.Array:
    """Name the sum h, or the activation's input z, of rms_norm_linear."""
    names = {"h": OPERATIONS["norm"].out_name, "z": _PREACTIVATION}
    return checkpoint_name(a, names[result])


# ----------------------------------------------------------------------------- jax_remat3


def register(primitive: Primitive, rules: Any) -> None:
    """Add a rule to a forward primitive: under ``jax_remat3``, policies can save its named outputs.

    `rules` are the `jaxnorm.primitives.rules.Rules` of its calls.
    """
    private = private_jax.remat3()
    if private is None:
        return
    table, transform, name = private

    def rule(trace: Any, *primals: Any, **static: Any) -> tuple[list[jax.Array], Any, Any]:
        """Return the results, what the policy saves, and a function for the backward pass.

        That function takes what was saved and the primals, and returns the results again.
        """
        (call,) = static.values()
        recompute = functools.partial(rules.bind, call)
        if (full := rules.with_residuals(call)) is None:
            return recompute(*primals), (), lambda _, *primals: recompute(*primals)
        # A saved array replaces its recomputation. For second-order derivatives, its own derivative
        # is that of the forward pass.
        with_names = functools.partial(named, rules.names(full), name=name)
        apply = functools.partial(
            transform, trace.policy, with_names, custom_vjp_rules=trace.custom_vjp_rules
        )
        types = rules.types(full, *map(jax.typeof, primals))
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
        if not jax.tree.leaves(jax.eval_shape(apply, shapes)[1]):  # The policy saves nothing.
            return recompute(*primals), (), lambda _, *primals: recompute(*primals)
        outputs, saved = apply(rules.bind(full, *primals))

        def restored(saved: Callable[..., list[jax.Array]], *primals: Any) -> list[jax.Array]:
            return _restored(rules, call, saved(rules.bind(full, *primals)), *primals)

        return rules.results(call, outputs), saved, restored

    table[primitive] = rule


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _restored(
    rules: Any, call: Any, outputs: Sequence[jax.Array], *primals: jax.Array
) -> list[jax.Array]:
    """Return the given `outputs` as the results of a call, with the call's derivative."""
    del primals
    return rules.results(call, outputs)


@functools.partial(_restored.defjvp, symbolic_zeros=True)
def _(rules: Any, call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (outputs, *primals), (_, *tangents) = primals, tangents
    tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
    results, tangents = rules.derived(call, outputs, primals, tangents)
    return results, [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents]
