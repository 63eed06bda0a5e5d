"""Whose functions are compared: one entry each, one adapter module beside this file for each.

An adapter has ``function(name, op, y_dtype)``: a differentiable function of x and the parameters
that the operation has (scale, bias), made of the library's public API. It is imported in the
processes of its side alone, so this table is all that a machine without the library needs. A new
provider is a line here, an adapter, and a colour in plots.py.
"""

import dataclasses
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

from benchmarks.workloads import OPERATIONS, Operation, Workload

Side = Literal["jax", "torch"]
SIDES: tuple[Side, ...] = ("jax", "torch")
NORMS: tuple[Operation, ...] = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True)
class Provider:
    """One line of a plot.

    Attributes:
      label: name for readers.
      side: the framework, hence the processes, that it runs in.
      adapter: module of this package.
      distributions: what has to be installed; their versions go with every figure.
      operations: what it offers.
      mixed: operations that it offers with x in float32 and the output in bfloat16.
      wide_parameters: scale and bias are float32 whatever x is; else they have x's dtype.
      note: what a reader of its figures has to know.
    """

    label: str
    side: Side
    adapter: str
    distributions: tuple[str, ...]
    operations: tuple[Operation, ...] = OPERATIONS
    mixed: tuple[Operation, ...] = ()
    wide_parameters: bool = True
    note: str = ""

    def offers(self, workload: Workload) -> bool:
        among = self.operations if workload.x_dtype == workload.y_dtype else self.mixed
        return workload.op in among

    def parameter_dtype(self, x_dtype: str) -> str:
        return "float32" if self.wide_parameters else x_dtype

    @property
    def software(self) -> str:
        """Names and versions; raises ModuleNotFoundError where one is not installed."""
        try:
            return " + ".join(f"{name} {metadata.version(name)}" for name in self.distributions)
        except metadata.PackageNotFoundError as error:
            name = error.args[0]
            raise ModuleNotFoundError(f"{name} is not installed: pip install {name}") from None


PROVIDERS: dict[str, Provider] = {
    "jaxnorm": Provider("jaxnorm", "jax", "jaxnorm_functions", ("jax",), mixed=NORMS),
    "mosaic": Provider("jaxnorm mosaic", "jax", "jaxnorm_functions", ("jax",), mixed=NORMS),
    "triton": Provider(
        "jaxnorm triton",
        "jax",
        "jaxnorm_functions",
        ("jax", "jax-triton", "triton"),
        mixed=NORMS,
    ),
    "xla": Provider("jaxnorm xla", "jax", "jaxnorm_functions", ("jax",), mixed=NORMS),
    "jnp": Provider("jnp", "jax", "jnp_functions", ("jax",), mixed=NORMS),
    "flax": Provider("Flax", "jax", "flax_modules", ("jax", "flax"), NORMS, mixed=NORMS),
    "tokamax": Provider(
        "tokamax",
        "jax",
        "tokamax_functions",
        ("jax", "tokamax", "jax-triton", "triton"),
        NORMS,
        note="tokamax's backward writes dx over x. The copy of x that XLA makes before it is no "
        "kernel and is not counted, and of small arrays it leaves a part in the cache.",
    ),
    "quack": Provider(
        "QuACK",
        "torch",
        "quack_functions",
        ("torch", "quack-kernels"),
        ("softmax", *NORMS),
        mixed=("rms_norm",),
    ),
    "liger": Provider(
        "Liger",
        "torch",
        "liger_functions",
        ("torch", "liger-kernel", "triton"),
        ("softmax", *NORMS),
        wide_parameters=False,
        note="Liger's RMSNorm writes dx over dy.",
    ),
    "torch": Provider(
        "torch eager",
        "torch",
        "torch_functions",
        ("torch",),
        mixed=NORMS,
        wide_parameters=False,
    ),
    "torch.compile": Provider(
        "torch.compile",
        "torch",
        "torch_functions",
        ("torch", "triton"),
        mixed=NORMS,
        wide_parameters=False,
    ),
}


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., Any]:
    """The differentiable function of x and the parameters that the provider gives for `op`."""
    adapter = importlib.import_module(f"{__name__}.{PROVIDERS[name].adapter}")
    return adapter.function(name, op, y_dtype)
