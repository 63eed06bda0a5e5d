"""The compared libraries: an entry for each in this table, and an adapter module beside this file.

An adapter has ``function(name, op, y_dtype)``, which returns a differentiable function that uses
the library's public API. The function takes the row operands and the parameters that the operation
has: x, scale and bias; x, residual, ... for a block; x, weight (if any) and labels for a loss; x,
weight and scale for a matmul. It returns y, or several results in a tuple. An adapter is only
imported in the processes of its side, so a machine without the library needs only this table. A new
provider is a line here, an adapter, and a colour in plots.py.
"""

import dataclasses
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

from benchmarks import program_folders
from benchmarks.blocks import BLOCKS, MIXED
from benchmarks.linear import LINEAR
from benchmarks.losses import CROSS_ENTROPIES, LOSSES
from benchmarks.workloads import OPERATIONS, Operation, ShapedWorkload, Workload

# The two Triton sides are JAX with kernels that another machine has compiled.
Side = Literal["jax", "triton_sm80", "triton_sm90", "torch"]
SIDES: tuple[Side, ...] = ("jax", "triton_sm80", "triton_sm90", "torch")
NORMS: tuple[Operation, ...] = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True)
class Provider:
    """A provider, which is one line of a plot.

    Attributes:
      label: the name for readers.
      side: the framework, and therefore the processes, in which it runs.
      adapter: the module of this package.
      distributions: the packages that must be installed; their versions are recorded with every
        figure.
      operations: the operations it offers.
      blocks, losses, linear: the blocks, losses and matmuls it offers.
      mixed: operations it offers with float32 x and bfloat16 output, and blocks with a float32
        residual stream and bfloat16 x and y.
      overwrites: operations that overwrite their row operands.
      wide_parameters: True if scale and bias are always float32; otherwise they have x's dtype.
      note: a caveat for readers of its figures.
    """

    label: str
    side: Side
    adapter: str
    distributions: tuple[str, ...]
    operations: tuple[Operation, ...] = OPERATIONS
    blocks: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    wide_parameters: bool = True
    note: str = ""

    def offers(self, workload: Workload | ShapedWorkload) -> bool:
        plain = (*self.operations, *self.blocks, *self.losses, *self.linear)
        return workload.op in (self.mixed if workload.mixed else plain)

    def parameter_dtype(self, x_dtype: str) -> str:
        return "float32" if self.wide_parameters else x_dtype

    @property
    def software(self) -> str:
        """The installed packages with versions; ModuleNotFoundError if one is missing."""
        if self.side in program_folders.SIDES:
            return program_folders.software(self.side)
        try:
            return " + ".join(f"{name} {metadata.version(name)}" for name in self.distributions)
        except metadata.PackageNotFoundError as error:
            name = error.args[0]
            raise ModuleNotFoundError(f"{name} is not installed: pip install {name}") from None


_EVERYTHING: dict[str, Any] = {
    "blocks": tuple(BLOCKS),
    "mixed": (*NORMS, *MIXED),
    "losses": tuple(LOSSES),
    "linear": tuple(LINEAR),
}
_JAXNORM: dict[str, Any] = {**_EVERYTHING, "linear": ("rms_norm_linear",)}
_NO_PRODUCTS: dict[str, Any] = {**_EVERYTHING, "linear": ()}
_TRITON: tuple[str, tuple[str, ...]] = ("jaxnorm_functions", ("jax",))

PROVIDERS: dict[str, Provider] = {
    "jaxnorm": Provider("jaxnorm", "jax", "jaxnorm_functions", ("jax",), **_JAXNORM),
    "mosaic": Provider("jaxnorm mosaic", "jax", "jaxnorm_functions", ("jax",), **_JAXNORM),
    "triton": Provider(
        "jaxnorm triton",
        "jax",
        "jaxnorm_functions",
        ("jax", "jax-triton", "triton"),
        **_NO_PRODUCTS,
    ),
    # Kernels for an A100 and an H100, compiled elsewhere: see benchmarks/triton_programs.py.
    "triton_sm80": Provider("jaxnorm triton for sm_80", "triton_sm80", *_TRITON, **_NO_PRODUCTS),
    "triton_sm90": Provider("jaxnorm triton for sm_90", "triton_sm90", *_TRITON, **_NO_PRODUCTS),
    "xla": Provider("jaxnorm xla", "jax", "jaxnorm_functions", ("jax",), **_JAXNORM),
    # jaxnorm's plain functions with jnp's arithmetic, for blocks that one function of jaxnorm
    # covers. In a single dtype, add_rms_norm and add_layer_norm composed in this way are the blocks
    # residual_*.
    "composed": Provider(
        "jaxnorm composed",
        "jax",
        "jaxnorm_functions",
        ("jax",),
        operations=(),
        blocks=tuple(op for op in BLOCKS if not op.startswith(("add_", "residual_"))),
        linear=("rms_norm_linear",),
        mixed=MIXED,
    ),
    "jnp": Provider("jnp", "jax", "jnp_functions", ("jax",), **_EVERYTHING),
    "flax": Provider("Flax", "jax", "flax_modules", ("jax", "flax"), NORMS, mixed=NORMS),
    "optax": Provider(
        "optax", "jax", "optax_functions", ("jax", "optax"), (), losses=CROSS_ENTROPIES
    ),
    # This is not a loss but its matmuls alone, with which the time of a loss is compared.
    "products": Provider(
        "matrix products",
        "jax",
        "matrix_products",
        ("jax",),
        (),
        losses=tuple(op for op, loss in LOSSES.items() if loss.products),
    ),
    "tokamax": Provider(
        "tokamax",
        "jax",
        "tokamax_functions",
        ("jax", "tokamax", "jax-triton", "triton"),
        NORMS,
        losses=("linear_cross_entropy",),
        note="tokamax's backward overwrites x with dx. XLA copies x before it; this copy is not a "
        "kernel and not counted, and it leaves a part of small arrays in the cache.",
    ),
    "quack": Provider(
        "QuACK",
        "torch",
        "quack_functions",
        ("torch", "quack-kernels"),
        ("softmax", *NORMS),
        blocks=("add_rms_norm",),
        losses=("cross_entropy",),
        linear=tuple(LINEAR),
        mixed=("rms_norm", "add_rms_norm"),
    ),
    "liger": Provider(
        "Liger",
        "torch",
        "liger_functions",
        ("torch", "liger-kernel", "triton"),
        ("softmax", *NORMS),
        blocks=("add_rms_norm",),
        losses=CROSS_ENTROPIES,
        overwrites=("cross_entropy", "capped_cross_entropy"),
        wide_parameters=False,
        note="Liger's RMSNorm overwrites dy with dx.",
    ),
    "fla": Provider(
        "flash-linear-attention",
        "torch",
        "fla_functions",
        ("torch", "flash-linear-attention", "triton"),
        (),
        blocks=("gated_rms_norm", "gate_first_rms_norm"),
        wide_parameters=False,
    ),
    "torch": Provider(
        "torch eager",
        "torch",
        "torch_functions",
        ("torch",),
        linear=tuple(LINEAR),
        mixed=NORMS,
        wide_parameters=False,
    ),
    "torch.compile": Provider(
        "torch.compile",
        "torch",
        "torch_functions",
        ("torch", "triton"),
        **_EVERYTHING,
        wide_parameters=False,
    ),
}


def function(name: str, op: str, y_dtype: str) -> Callable[..., Any]:
    """Return the provider's function for `op`; it takes operands and parameters."""
    return _adapter(name).function(name, op, y_dtype)


def operands(name: str) -> Callable[..., tuple[Any, ...]]:
    """Return a function that turns row operands into those that the provider's functions take."""
    return getattr(_adapter(name), "operands", lambda *rows: rows)


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{PROVIDERS[name].adapter}")
