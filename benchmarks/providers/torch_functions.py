"""Functions of torch, run eagerly and compiled with torch.compile."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional

from benchmarks.losses import SOFTCAP


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, scale.shape, scale, bias, eps=1e-6)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.rms_norm(x, scale.shape, scale, eps=1e-6)


def softmax(x: Tensor) -> Tensor:
    return functional.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return functional.log_softmax(x, dim=-1)


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, scale), h


def add_layer_norm(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return layer_norm(h, scale, bias), h


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def capped_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(SOFTCAP * torch.tanh(logits.float() / SOFTCAP), labels)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(x @ weight, labels).mean()


def capped_linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return capped_cross_entropy(x @ weight, labels).mean()


def log_prob_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = log_softmax(logits.float())
    chosen = log_probs.gather(-1, labels[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def linear_log_prob_and_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return log_prob_and_entropy(x @ weight, labels)


def kl_divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    log_q, log_p = (log_softmax(z.float()) for z in (logits, teacher_logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl_divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    return kl_divergence(teacher_logits, logits)


def linear_kl_divergence(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor
) -> Tensor:
    return kl_divergence(x @ weight, teacher_x @ teacher_weight).mean()


_FUNCTIONS = (
    *(softmax, log_softmax, layer_norm, rms_norm, add_rms_norm, add_layer_norm),
    *(cross_entropy, capped_cross_entropy, linear_cross_entropy, capped_linear_cross_entropy),
    *(log_prob_and_entropy, linear_log_prob_and_entropy),
    *(kl_divergence, reverse_kl_divergence, linear_kl_divergence),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in _FUNCTIONS},
    "residual_rms_norm": add_rms_norm,
    "residual_layer_norm": add_layer_norm,
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    dtype = getattr(torch, y_dtype)

    def cast(x: Tensor, *others: Tensor) -> Any:
        results = FUNCTIONS[op](x, *others)
        if isinstance(results, tuple):
            y, h = results
            return y.to(dtype), h
        return results.to(dtype)

    if name == "torch":
        return cast
    # For each code object, torch caches compiled code for at most 8 shapes, and runs later shapes
    # eagerly. So each function gets a separate code object. The alternative, torch._dynamo.reset(),
    # would discard the compiled code of all functions.
    code = cast.__code__.replace()
    own = types.FunctionType(code, cast.__globals__, closure=cast.__closure__)
    # The backward pass of a graph runs several times, so torch must not reuse the memory of saved
    # tensors for results.
    functorch_config.donated_buffer = False
    return torch.compile(own, dynamic=False)
