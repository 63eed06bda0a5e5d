"""The compared libraries, called providers: a table, and an adapter module for each.

An adapter has a function ``function(name, op, y_dtype)``. It returns a function f, which is
differentiable and uses the library's public API. f returns y, or a tuple of several results. The
arguments of f are

* for a norm: x, scale, and bias (if any)
* for a block: the operands with rows (x, residual, ...), then the parameters
* for a loss with labels: x, weight (if any), labels
* for a loss with a teacher: x, weight (if any), then the teacher's x and weight (if any)

A *side* is a framework, JAX or torch, whose providers run in separate processes. An adapter is only
imported in the processes of its side, so a machine without the library needs only this table. To
add a provider, add an entry here and an adapter.
"""

import dataclasses
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

from benchmarks.blocks import BLOCKS, MIXED
from benchmarks.losses import CROSS_ENTROPIES, LOSSES
from benchmarks.workloads import OPERATIONS, Operation, ShapedWorkload, Workload

# A side is a group of benchmark processes with the same framework.
Side = Literal["jax", "torch"]
SIDES: tuple[Side, ...] = ("jax", "torch")
NORMS: tuple[Operation, ...] = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True)
class Provider:
    """A provider: a library, or one way to call a library.

    Attributes:
      side: the framework in whose processes the provider runs.
      adapter: the name of its adapter module in this package.
      distributions: the packages that must be installed. Their versions are recorded with every
        result.
      operations: names of the norms and softmaxes that the provider has.
      blocks, losses: names of the blocks and losses that the provider has.
      mixed: names of the operations and blocks that the provider can run with mixed dtypes. An
        operation then has float32 x and bfloat16 output. A block has a float32 residual stream,
        and bfloat16 x and y.
      overwrites: names of the operations that overwrite their operands.
      wide_parameters: True if scale and bias are always float32; otherwise they have x's dtype.
    """

    side: Side
    adapter: str
    distributions: tuple[str, ...]
    operations: tuple[Operation, ...] = OPERATIONS
    blocks: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    wide_parameters: bool = True

    def offers(self, workload: Workload | ShapedWorkload) -> bool:
        plain = (*self.operations, *self.blocks, *self.losses)
        return workload.op in (self.mixed if workload.mixed else plain)

    def parameter_dtype(self, x_dtype: str) -> str:
        return "float32" if self.wide_parameters else x_dtype

    @property
    def software(self) -> str:
        """The names and versions of the packages. Raise ModuleNotFoundError if one is missing."""
        try:
            return " + ".join(f"{name} {metadata.version(name)}" for name in self.distributions)
        except metadata.PackageNotFoundError as error:
            name = error.args[0]
            raise ModuleNotFoundError(f"{name} is not installed: pip install {name}") from None


_EVERYTHING: dict[str, Any] = {
    "blocks": tuple(BLOCKS),
    "mixed": (*NORMS, *MIXED),
    "losses": tuple(LOSSES),
}
#: Providers that compute the linear cross-entropy with jaxnorm. "_2048" stands for chunks of 2048
#: rows. "linear_loss" is `jaxnorm.linear_loss` of jaxnorm's cross-entropy. "linear_loss_plain" is
#: `jaxnorm.linear_loss` of a cross-entropy in plain JAX.
LINEAR_LOSSES = (
    *("jaxnorm_2048", "linear_loss", "linear_loss_2048"),
    *("linear_loss_plain", "linear_loss_plain_2048"),
)
_LINEAR: dict[str, Any] = {"losses": ("linear_cross_entropy",)}
_JAXNORM = Provider("jax", "jaxnorm_functions", ("jax",), **_EVERYTHING)
_TORCH = Provider("torch", "torch_functions", ("torch",), mixed=NORMS, wide_parameters=False)
PROVIDERS: dict[str, Provider] = {
    "jaxnorm": _JAXNORM,
    "mosaic": _JAXNORM,
    "triton": dataclasses.replace(_JAXNORM, distributions=("jax", "jax-triton", "triton")),
    "xla": _JAXNORM,
    **dict.fromkeys(LINEAR_LOSSES, Provider("jax", "jaxnorm_functions", ("jax",), (), **_LINEAR)),
    "jnp": Provider("jax", "jnp_functions", ("jax",), **_EVERYTHING),
    "flax": Provider("jax", "flax_modules", ("jax", "flax"), NORMS, mixed=NORMS),
    "optax": Provider("jax", "optax_functions", ("jax", "optax"), (), losses=CROSS_ENTROPIES),
    "tokamax": Provider(
        "jax",
        "tokamax_functions",
        ("jax", "tokamax", "jax-triton", "triton"),
        NORMS,
        **_LINEAR,
    ),
    "quack": Provider(
        "torch",
        "quack_functions",
        ("torch", "quack-kernels"),
        ("softmax", *NORMS),
        blocks=("add_rms_norm",),
        losses=("cross_entropy", "linear_cross_entropy"),
        mixed=("rms_norm", "add_rms_norm"),
    ),
    "liger": Provider(
        "torch",
        "liger_functions",
        ("torch", "liger-kernel", "triton"),
        ("softmax", *NORMS),
        blocks=("add_rms_norm",),
        losses=CROSS_ENTROPIES,
        overwrites=("cross_entropy", "capped_cross_entropy"),
        wide_parameters=False,
    ),
    "torch": _TORCH,
    "torch.compile": dataclasses.replace(
        _TORCH,
        distributions=("torch", "triton"),
        blocks=("add_rms_norm", "add_layer_norm", "residual_rms_norm", "residual_layer_norm"),
        losses=tuple(LOSSES),
        mixed=(*NORMS, *MIXED),
    ),
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    """Return the provider's function for `op`. Its arguments are operands, then parameters."""
    adapter = importlib.import_module(f"{__name__}.{PROVIDERS[name].adapter}")
    return adapter.function(name, op, y_dtype)
