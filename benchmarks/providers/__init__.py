"""The compared libraries, called providers: a table, and an adapter module for each.

An adapter has ``function(name, op, y_dtype)``. It returns another function, which is differentiable
and uses the library's public API. That function returns y, or a tuple of several results. It takes

* for a norm: x, scale, and bias (if any)
* for a block: the operands with rows (x, residual, ...), then the parameters
* for a loss with labels: x, weight (if any), labels
* for a loss with a teacher: x, weight (if any), then the teacher's x and weight (if any)
* for a norm with a matmul: x, weight and scale

A *side* is a framework, JAX or torch, whose providers run in separate processes. An adapter is only
imported in the processes of its side, so a machine without the library needs only this table. To
add a provider, add an entry here, an adapter, and a colour in plots.py.
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

# A side is a group of benchmark processes with the same framework. The processes of the sides
# triton_sm80 and triton_sm90 also use JAX. They run Triton kernels that another machine compiled.
Side = Literal["jax", "triton_sm80", "triton_sm90", "torch"]
SIDES: tuple[Side, ...] = ("jax", "triton_sm80", "triton_sm90", "torch")
NORMS: tuple[Operation, ...] = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True)
class Provider:
    """A provider: a library, or one way to call a library.

    Attributes:
      label: the provider's name in tables and plots.
      side: the framework in whose processes the provider runs.
      adapter: the name of its adapter module in this package.
      distributions: the packages that must be installed. Their versions are recorded with every
        result.
      operations: names of the norms and softmaxes that the provider has.
      blocks, losses, linear: names of the blocks, losses and matmuls that the provider has.
      mixed: names of the operations and blocks that the provider can run with mixed dtypes. An
        operation then has float32 x and bfloat16 output. A block has a float32 residual stream,
        and bfloat16 x and y.
      overwrites: names of the operations that overwrite their operands.
      wide_parameters: True if scale and bias are always float32; otherwise they have x's dtype.
      note: a caveat that is printed next to its results.
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
        """The names and versions of the packages. Raise ModuleNotFoundError if one is missing."""
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
# The fields `distributions`, `operations`, `blocks` and `losses` of a provider, in this order.
_LINEAR_LOSS: tuple[Any, ...] = ((), (), ("linear_cross_entropy",))
_LINEAR_LOSSES = tuple(op for op, loss in LOSSES.items() if loss.products)
_LIGER_CUTE = (("torch", "liger-kernel", "nvidia-cutlass-dsl"), *_LINEAR_LOSS)
_CCE = (("torch", "cut-cross-entropy", "triton"), *_LINEAR_LOSS)

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
    # Two providers that run Triton kernels. One has kernels compiled for an A100, and the other has
    # kernels compiled for an H100. All were compiled on another machine: see
    # benchmarks/triton_programs.py.
    "triton_sm80": Provider("jaxnorm triton for sm_80", "triton_sm80", *_TRITON, **_NO_PRODUCTS),
    "triton_sm90": Provider("jaxnorm triton for sm_90", "triton_sm90", *_TRITON, **_NO_PRODUCTS),
    "xla": Provider("jaxnorm xla", "jax", "jaxnorm_functions", ("jax",), **_JAXNORM),
    # jaxnorm has a single function for each of these blocks. The provider `composed` does not call
    # this function. Instead it calls jaxnorm's plain norm or softmax, and computes the rest of the
    # block in jax.numpy. `composed` measures the blocks add_rms_norm and add_layer_norm only with
    # mixed dtypes. With a single dtype, it would run the same code as the provider `jaxnorm` runs
    # for the blocks residual_rms_norm and residual_layer_norm.
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
    # This provider computes only the matmuls of a loss. Their time is the reference for the loss.
    "products": Provider(
        "matrix products",
        "jax",
        "matrix_products",
        ("jax",),
        (),
        losses=_LINEAR_LOSSES,
    ),
    # jaxnorm's linear losses with a given number of rows in each chunk, instead of the default.
    **{
        f"chunk_{rows}": Provider(
            f"jaxnorm, chunk={rows}",
            "jax",
            "jaxnorm_functions",
            ("jax",),
            (),
            losses=_LINEAR_LOSSES,
        )
        for rows in (1024, 2048, 4096, 8192)
    },
    "tokamax": Provider(
        "tokamax",
        "jax",
        "tokamax_functions",
        ("jax", "tokamax", "jax-triton", "triton"),
        NORMS,
        losses=("linear_cross_entropy",),
        note="tokamax's backward pass overwrites x with dx, so XLA copies x before it. This copy "
        "is not a kernel, so its time is not counted. After the copy, a small array is partly in "
        "the GPU's cache, which makes tokamax's kernel faster.",
    ),
    "quack": Provider(
        "QuACK",
        "torch",
        "quack_functions",
        ("torch", "quack-kernels"),
        ("softmax", *NORMS),
        blocks=("add_rms_norm",),
        losses=("cross_entropy", "linear_cross_entropy"),
        linear=tuple(LINEAR),
        mixed=("rms_norm", "add_rms_norm"),
    ),
    # QuACK's linear loss with `use_scaled_exp=False`. QuACK itself selects False if the size of
    # the vocabulary is not a multiple of 128. The matmuls for the weight's gradient are not tuned
    # here.
    "quack_chunks": Provider(
        "QuACK, logits of a chunk",
        "torch",
        "quack_functions",
        ("torch", "quack-kernels"),
        (),
        losses=("linear_cross_entropy",),
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
        note="Liger's RMSNorm overwrites dy with dx, without copying dy first.",
    ),
    # Liger's linear loss with kernels in CuTe DSL, in two forms. In the first, a kernel processes a
    # chunk of logits, and cuBLAS runs the matmuls. In the second, kernels process all logits and
    # also run the matmuls; they need a Hopper GPU.
    "liger_cute": Provider("Liger CuTe", "torch", "liger_cute_functions", *_LIGER_CUTE),
    "liger_sm90": Provider(
        "Liger CuTe, whole logits", "torch", "liger_cute_functions", *_LIGER_CUTE
    ),
    # Apple's cut cross-entropy. By default, its backward pass leaves out blocks of logits whose
    # gradients are all below 2^-12.
    "cce": Provider("cut cross-entropy", "torch", "cce_functions", *_CCE),
    "cce_unfiltered": Provider("cut cross-entropy, unfiltered", "torch", "cce_functions", *_CCE),
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
    """Return the provider's function for `op`. Its arguments are operands, then parameters."""
    return _adapter(name).function(name, op, y_dtype)


def operands(name: str) -> Callable[..., tuple[Any, ...]]:
    """Return a function that converts a workload's row operands to those of the provider.

    Most providers take the row operands as they are.
    """
    return getattr(_adapter(name), "operands", lambda *rows: rows)


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{PROVIDERS[name].adapter}")
