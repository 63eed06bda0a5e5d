"""torch's own functions: eager, and the same through torch.compile."""

import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional

from benchmarks.workloads import Operation


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, scale.shape, scale, bias, eps=1e-6)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.rms_norm(x, scale.shape, scale, eps=1e-6)


def softmax(x: Tensor) -> Tensor:
    return functional.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return functional.log_softmax(x, dim=-1)


FUNCTIONS: dict[Operation, Callable[..., Tensor]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., Tensor]:
    dtype = getattr(torch, y_dtype)

    def cast(x: Tensor, *parameters: Tensor) -> Tensor:
        return FUNCTIONS[op](x, *parameters).to(dtype)

    if name == "torch":
        return cast
    # torch keeps what it compiles with a function's code, of 8 shapes at most: later ones would run
    # eagerly. So each function has its own code: torch._dynamo.reset() would forget them all.
    code = cast.__code__.replace()
    own = types.FunctionType(code, cast.__globals__, closure=cast.__closure__)
    # One graph is run backwards on rotating buffers: its saved tensors are not to be donated.
    functorch_config.donated_buffer = False
    return torch.compile(own, dynamic=False)
