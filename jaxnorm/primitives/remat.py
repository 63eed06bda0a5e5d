"""The names of residuals for `jax.checkpoint` policies, and the policy `jaxnorm.save_policy`.

JAX has two implementations of `jax.checkpoint`. The default implementation differentiates a block
first, and then applies the policy to the names in the derivative. It uses the names that the JVP
rules give to residuals.

The new implementation (``jax_remat3``) applies the policy while it evaluates the block, before any
JVP rule runs. So names in JVP rules have no effect. Instead, each forward primitive has a
rematerialisation rule, which provides two functions::

    forward     call(*primals)       runs the forward pass, names its residuals, and saves the
                                     residuals that the policy accepts
    backward    restored(*primals)   returns the results again; their derivative is computed
                                     from the saved residuals
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

# `save_policy` saves arrays with these names: the norms' outputs and all row statistics. The output
# of a softmax is not saved, because it is as large as the attention matrix.
_SAVED_NAMES = sorted(
    {
        name
        for operation in OPERATIONS.values()
        for name in (operation.statistics_name, operation.out_name)
        if name is not None and (operation.family == "norm" or name != operation.out_name)
    }
)

#: Policy for :func:`jax.checkpoint` that saves the results of norms and recomputes everything else.
#:
#: ``jax.checkpoint(block, policy=jaxnorm.save_policy)`` saves the outputs and statistics of the
#: norms (named ``jaxnorm_out`` and ``jaxnorm_rstd``), so the backward pass recomputes no norm. It
#: also saves the row statistics of a loss (``jaxnorm_lse``: the log-sum-exp as two numbers per row,
#: and other results per row that the derivative needs), but not the logits. Two named arrays are
#: not saved: a softmax's output, which is as large as the attention matrix
#: (``jaxnorm_softmax_out``), and the input of the activation of ``rms_norm_linear``
#: (``jaxnorm_preactivation``). To save them, or arrays that you name, pass all names to
#: :func:`jax.checkpoint_policies.save_only_these_names`, or combine two policies with
#: :func:`jax.checkpoint_policies.save_from_both_policies`.
#:
#: The policy is the return value of ``save_only_these_names``, which is a function or, depending on
#: the version of JAX, data. Pass it to JAX, and do not call it.
save_policy = jax.checkpoint_policies.save_only_these_names(*_SAVED_NAMES)


def names(call: Call) -> list[str | None]:
    """Return a list of the results' names for `jax.checkpoint` policies; None for no name.

    Three kinds of results have names:

    - The outputs of norms and softmaxes. If a norm is a step of another function, such as
      rms_norm_linear, the norm's output has no name, because that function does not return it.
    - Row statistics, and other results with one number per row, such as a loss. Derivatives may
      need them, and they are cheap to save.
    - The sum h, if the backward pass reads h. If it does not, recomputing h is cheaper than saving
      it.
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
    """Give arrays names, to which `jax.checkpoint` policies can refer, and return the arrays.

    `names` has a name or None for each array. An array with None is returned unchanged. `name` is
    the function that gives an array its name.
    """
    return [a if n is None else name(a, n) for n, a in zip(names, arrays, strict=True)]


def name_of_linear(result: str, a: jax.Array) -> jax.Array:
    """Give an intermediate array of rms_norm_linear its name, and return the array.

    `jax.checkpoint` policies can refer to the name. `result` says which array `a` is: "h", the sum
    that is normalised, or "z", the input of the activation.
    """
    names = {"h": OPERATIONS["norm"].out_name, "z": _PREACTIVATION}
    return checkpoint_name(a, names[result])


# ----------------------------------------------------------------------------- jax_remat3


def register(primitive: Primitive, rules: Any) -> None:
    """Register a forward primitive's rematerialisation rule for ``jax_remat3``.

    Policies can then save the residuals to which the call gives names. `rules` is the
    `jaxnorm.primitives.rules.Rules` object with the primitive's other rules.
    """
    private = private_jax.remat3()
    if private is None:
        return
    table, transform, name = private

    def rule(trace: Any, *primals: Any, **static: Any) -> tuple[list[jax.Array], Any, Any]:
        """Return the results, the saved arrays, and a function that JAX differentiates later.

        The function takes the saved arrays and the primals, and returns the results again. JAX
        differentiates it in the backward pass.
        """
        (call,) = static.values()
        recompute = functools.partial(rules.bind, call)
        if (full := rules.with_residuals(call)) is None:
            return recompute(*primals), (), lambda _, *primals: recompute(*primals)
        # The backward pass uses the saved arrays instead of recomputing them. If the backward pass
        # is itself differentiated, a saved array must not be treated as a constant: its derivative
        # is the derivative of the forward pass that computed it.
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
    """Return the results of a call, given its `outputs` (results and residuals).

    The derivative of this function is the derivative of the call. It is computed from `outputs`,
    without a new forward pass.
    """
    del primals
    return rules.results(call, outputs)


@functools.partial(_restored.defjvp, symbolic_zeros=True)
def _(rules: Any, call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (outputs, *primals), (_, *tangents) = primals, tangents
    tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
    results, tangents = rules.derived(call, outputs, primals, tangents)
    return results, [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents]
