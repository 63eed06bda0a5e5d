"""The functions of the providers that call jaxnorm, with its default or a given implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax

import jaxnorm
from benchmarks.blocks import CHANNEL_GROUPS, LOGITS_SCALE
from benchmarks.losses import SOFTCAP
from benchmarks.providers import jnp_functions


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, **given: Any) -> jax.Array:
    groups = x.reshape(*x.shape[:-1], CHANNEL_GROUPS, -1)
    parameters = (a.reshape(CHANNEL_GROUPS, 1, 1, -1) for a in (scale, bias))
    return jaxnorm.layer_norm(groups, *parameters, axis=(1, 2, 4), **given).reshape(x.shape)


# Maps the name of a block to two things: a function that calls jaxnorm, and a dict of keyword
# arguments for this function.
_BLOCKS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "add_rms_norm": (jaxnorm.add_rms_norm, {}),
    "add_layer_norm": (jaxnorm.add_layer_norm, {}),
    "post_norm": (jaxnorm.rms_norm_add, {}),
    "sandwich": (jaxnorm.rms_norm_add_rms_norm, {}),
    "ada_layer_norm": (jaxnorm.layer_norm, {"scale_offset": 1.0}),
    "gated_add_layer_norm": (
        lambda x, residual, scale, bias, gate, **given: jaxnorm.add_layer_norm(
            x, residual, scale, bias, gate=gate, **given
        ),
        {"scale_offset": 1.0},
    ),
    "masked_softmax": (
        lambda x, where, **given: jaxnorm.softmax(x, where=where, **given),
        {"scale": LOGITS_SCALE},
    ),
    "causal_softmax": (jaxnorm.softmax, {"scale": LOGITS_SCALE, "causal": True}),
    "biased_softmax": (
        lambda x, bias, **given: jaxnorm.softmax(x, bias=bias, **given),
        {"scale": LOGITS_SCALE},
    ),
    "column_softmax": (jaxnorm.softmax, {"axis": -2}),
    "channel_layer_norm": (jaxnorm.layer_norm, {"axis": 1}),
    "group_norm": (group_norm, {}),
    "group_norm_silu": (group_norm, {"activation": "silu"}),
    "rms_norm_rope": (
        lambda x, cos, sin, scale, **given: jaxnorm.rms_norm_rope(x, scale, cos, sin, **given),
        {},
    ),
    "gated_rms_norm": (jaxnorm.rms_norm_gated, {}),
    "gate_first_rms_norm": (jaxnorm.rms_norm_gated, {"norm_before_gate": False}),
}

_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": jaxnorm.softmax_cross_entropy_with_integer_labels,
    "capped_cross_entropy": functools.partial(
        jaxnorm.softmax_cross_entropy_with_integer_labels, logit_softcap=SOFTCAP
    ),
    "linear_cross_entropy": jaxnorm.linear_softmax_cross_entropy,
    "capped_linear_cross_entropy": functools.partial(
        jaxnorm.linear_softmax_cross_entropy, logit_softcap=SOFTCAP
    ),
    "log_prob_and_entropy": jaxnorm.log_prob_and_entropy,
    "linear_log_prob_and_entropy": jaxnorm.linear_log_prob_and_entropy,
    "kl_divergence": jaxnorm.kl_divergence,
    "reverse_kl_divergence": functools.partial(jaxnorm.kl_divergence, reverse=True),
    "linear_kl_divergence": jaxnorm.linear_kl_divergence,
}


def _plain_loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits) - logits[label]


# Ways to compute the linear cross-entropy. "_2048" after the name stands for chunks of 2048 rows.
_LINEAR_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "jaxnorm": jaxnorm.linear_softmax_cross_entropy,
    "linear_loss": functools.partial(
        jaxnorm.linear_loss, jaxnorm.softmax_cross_entropy_with_integer_labels
    ),
    "linear_loss_plain": functools.partial(jaxnorm.linear_loss, _plain_loss),
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    way, rows, _ = name.partition("_2048")
    if name != "jaxnorm" and way in _LINEAR_LOSSES:
        return functools.partial(_LINEAR_LOSSES[way], chunk=2048 if rows else None)
    implementation = None if name == "jaxnorm" else name

    def plain(norm: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(norm, implementation=implementation)

    if op in ("softmax", "log_softmax", "layer_norm", "rms_norm"):
        return functools.partial(plain(getattr(jaxnorm, op)), dtype=y_dtype)
    if op in _LOSSES:
        return plain(_LOSSES[op])
    if op not in _BLOCKS:  # an addition, and then a norm
        norms = plain(jaxnorm.rms_norm), plain(jaxnorm.layer_norm)
        return jnp_functions.Plain(*norms, plain(jaxnorm.softmax)).block(op, y_dtype)
    block, given = _BLOCKS[op]
    if op != "post_norm":  # it has no argument `dtype`: its result has the residual's dtype
        given = {**given, "dtype": y_dtype}
    return functools.partial(plain(block), **given)
