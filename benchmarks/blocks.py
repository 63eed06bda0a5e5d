"""Blocks: a norm or softmax with the elementwise operations of a model before and after it.

XLA cannot fuse a kernel with the operations around it. So a kernel is timed as part of a block. It
is compared with plain JAX code for the same block, which XLA can fuse. To add a block, add an entry
to `BLOCKS`, and a function to each module of `benchmarks/providers` whose library has the block.

Like `workloads`, this module imports neither JAX nor torch.
"""

import dataclasses
import math
from collections.abc import Mapping

from benchmarks.workloads import ITEMSIZE, Array, Direction, Shape, ShapedWorkload

# Shapes (rows, columns) of x. In bfloat16, the smallest of these arrays has 50 MB, the largest
# 134 MB.
ROWS_BY_COLS: tuple[Shape, ...] = (
    (32768, 768),
    (32768, 1024),
    (16384, 2048),
    (8192, 4096),
    (8192, 5120),
    (8192, 8192),
    (4096, 12288),
    (4096, 16384),
)
DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
DTYPES = ("bfloat16", "float32", "mixed")
#: The shape of attention logits: batch, heads, queries, keys.
LOGITS: Shape = (4, 16, 2048, 2048)
#: The number by which attention logits are multiplied: 1 / sqrt(64), for heads with 64 columns.
LOGITS_SCALE = 0.125
#: Shapes (batch, length, number of heads, columns of a head) of queries, of keys, and of arrays
#: that contain queries and keys.
HEADS: tuple[Shape, ...] = (
    *((4, 2048, heads, 128) for heads in (32, 8, 40)),
    *((4, 2048, 40, 64), (4, 2048, 20, 256)),
)
#: The names of the tables of cosines and sines for a rotation (RoPE). A table is a float32 array
#: with one number for each position and pair of columns. All heads share the tables.
TABLES = ("cos", "sin")
#: Shapes (rows, columns) of gated norms. In the first three shapes, a row is one head, as in gated
#: delta nets. In the remaining shapes, a row is a whole hidden state.
GATED: tuple[Shape, ...] = ((524288, 64), (262144, 128), (131072, 256), *ROWS_BY_COLS)
#: The number of groups into which GroupNorm divides the channels.
CHANNEL_GROUPS = 32


@dataclasses.dataclass(frozen=True)
class Block:
    """The arrays of one block: operands, results, saved arrays, and gradients.

    Attributes:
      results: names of the results: ("y", "h") if the block returns the residual stream h,
        otherwise ("y",).
      saved: names of the arrays that the backward pass reads. It also reads the cotangents. No
        smaller set of arrays suffices to compute the gradients.
      gradients: names of the operands of x's shape whose gradients are separate arrays. A residual
        that is added to x is not listed: its gradient is the same array as the gradient of x.
      parameters: names of the norms' scales and biases.
      operands: names of the operands that have x's shape, or broadcast to it. The operand `where`
        is boolean.
      broadcast: a dict of the operands that have size 1 along one axis. It maps the name of such
        an operand to the index of this axis.
      shapes: the shapes of x with which the block is measured.
      axis: the index of the normalised axis.
      grouped: True if each sample has separate parameters. A parameter then has the size of x along
        the first axis and the normalised axis, and size 1 along the other axes.
      mixed: True if the block is also measured with a float32 residual stream (residual and h) and
        bfloat16 x and y.
    """

    results: tuple[str, ...]
    saved: tuple[str, ...]
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]
    operands: tuple[str, ...] = ("x", "residual")
    broadcast: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shapes: tuple[Shape, ...] = ROWS_BY_COLS
    axis: int = -1
    grouped: bool = False
    mixed: bool = False

    directions = DIRECTIONS

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype in DTYPES if dtype != "mixed" or self.mixed)


_ADD_RMS_NORM = Block(("y", "h"), saved=("y",), gradients=("x",), parameters=("scale",))
_ADD_LAYER_NORM = dataclasses.replace(_ADD_RMS_NORM, parameters=("scale", "bias"))
_SOFTMAX = Block(
    ("y",), saved=("y",), gradients=("x",), parameters=(), operands=("x",), shapes=(LOGITS,)
)
_GROUP_NORM = dataclasses.replace(
    _SOFTMAX,
    parameters=("scale", "bias"),
    shapes=((32, 64, 64, 256), (8, 128, 128, 128)),
)
_GATED_RMS_NORM = Block(
    ("y",),
    saved=("x", "gate"),
    gradients=("x", "gate"),
    parameters=("scale",),
    operands=("x", "gate"),
    shapes=GATED,
)

BLOCKS: dict[str, Block] = {
    # h = x + residual, y = norm(h): the step of a pre-norm model.
    "add_rms_norm": dataclasses.replace(_ADD_RMS_NORM, mixed=True),
    "add_layer_norm": dataclasses.replace(_ADD_LAYER_NORM, mixed=True),
    # Also h = x + residual and y = norm(h), but computed by an addition and a call of a library's
    # plain norm, as in the code of many models.
    "residual_rms_norm": _ADD_RMS_NORM,
    "residual_layer_norm": _ADD_LAYER_NORM,
    # y = residual + norm(x): `rms_norm_add`.
    "post_norm": Block(("y",), saved=("x",), gradients=("x",), parameters=("scale",)),
    # h = residual + norm(x), y = norm(h): `rms_norm_add_rms_norm`, as in Gemma's layers.
    "sandwich": Block(
        ("y", "h"),
        saved=("x", "y"),
        gradients=("x", "residual"),
        parameters=("scale", "next_scale"),
    ),
    # y = norm(x) * (1 + scale) + bias. Each sample has a separate scale and bias. Diffusion
    # transformers call this step adaLN.
    "ada_layer_norm": Block(
        ("y",),
        saved=("y",),
        gradients=("x",),
        parameters=("scale", "bias"),
        operands=("x",),
        shapes=((32, 1024, 1152), (16, 1024, 2048), (8, 2048, 4096)),
        grouped=True,
    ),
    # h = residual + gate * x, y = norm(h) * (1 + scale) + bias. Diffusion transformers call this
    # step adaLN-zero.
    "gated_add_layer_norm": Block(
        ("y", "h"),
        saved=("x", "y"),
        gradients=("x", "residual"),
        parameters=("scale", "bias", "gate"),
        shapes=((32, 1024, 1152), (8, 4096, 1536)),
        grouped=True,
    ),
    # Three softmaxes of scaled logits, y = softmax(scale * x). The first has a mask that all heads
    # share. The second has a causal mask. The third adds a bias to the logits, such as a position
    # bias. Each head has a separate bias, and all samples share it.
    "masked_softmax": dataclasses.replace(
        _SOFTMAX, operands=("x", "where"), broadcast={"where": 1}
    ),
    "causal_softmax": _SOFTMAX,
    "biased_softmax": dataclasses.replace(
        _SOFTMAX, operands=("x", "bias"), gradients=("x", "bias"), broadcast={"bias": 0}
    ),
    # Two operations whose normalised axis is not the last: a softmax over the queries of attention,
    # and a LayerNorm over the channels of images.
    "column_softmax": dataclasses.replace(_SOFTMAX, shapes=((8, 4096, 4096),), axis=-2),
    "channel_layer_norm": dataclasses.replace(
        _SOFTMAX, parameters=("scale", "bias"), shapes=((32, 256, 64, 64),), axis=1
    ),
    # GroupNorm of images with channels last, as in diffusion models. It normalises over all
    # positions and over the channels of a group. In the second block, silu follows the norm. There,
    # x is saved, because the norm's result cannot be recovered from y.
    "group_norm": _GROUP_NORM,
    "group_norm_silu": dataclasses.replace(_GROUP_NORM, saved=("x",)),
    # y = rotation(norm(x), cos, sin), for queries and keys of attention. The tables cos and sin
    # have a row for each position.
    "rms_norm_rope": dataclasses.replace(
        _SOFTMAX,
        parameters=("scale",),
        operands=("x", *TABLES),
        shapes=HEADS,
    ),
    # Two forms of `rms_norm_gated`: y = norm(x) * silu(gate), as in gated delta nets (Qwen3-Next),
    # and y = norm(x * silu(gate)), as in Mamba 2.
    "gated_rms_norm": _GATED_RMS_NORM,
    "gate_first_rms_norm": _GATED_RMS_NORM,
}
MIXED = tuple(name for name, block in BLOCKS.items() if block.mixed)


class BlockWorkload(ShapedWorkload):
    """A workload that runs one entry of the table `BLOCKS` (see `ShapedWorkload`).

    `shape` and `dtype` are the shape and the dtype of x.
    """

    @property
    def block(self) -> Block:
        return BLOCKS[self.op]

    @property
    def cols(self) -> int:
        return self.sizes[self.block.axis]

    @property
    def mixed(self) -> bool:
        return self.dtype == "mixed"

    def dtype_of(self, name: str) -> str:
        """Return the dtype of the array called `name`, and of its cotangent."""
        if name == "where":
            return "bool"
        if name in TABLES:
            return "float32"
        if not self.mixed:
            return self.dtype
        return "float32" if name in ("residual", "h") else "bfloat16"

    @property
    def x_dtype(self) -> str:
        """The dtype of the array that is normalised: h if the block returns it, otherwise x."""
        return self.dtype_of("h" if "h" in self.block.results else "x")

    @property
    def y_dtype(self) -> str:
        return self.dtype_of("y")

    def shape_of(self, name: str) -> Shape:
        """Return the shape of the operand or result called `name`, which is not a parameter."""
        if name in TABLES:
            length, _, cols = self.sizes[-3:]
            return (length, 1, cols // 2)
        axis = self.block.broadcast.get(name)
        return tuple(1 if at == axis else size for at, size in enumerate(self.sizes))

    @property
    def row_operands(self) -> tuple[Array, ...]:
        return tuple((self.shape_of(name), self.dtype_of(name)) for name in self.block.operands)

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        first, *others, _ = self.sizes
        lead = (first, *(1 for _ in others)) if self.block.grouped else ()
        return ((*lead, self.cols),) * len(self.block.parameters)

    @property
    def cotangents(self) -> tuple[Array, ...]:
        return tuple((self.sizes, self.dtype_of(name)) for name in self.block.results)

    @property
    def gradients(self) -> tuple[int, ...]:
        """The operands whose gradients are separate arrays, as indices into `block.operands`."""
        names = self.block.operands if self.mixed else self.block.gradients
        return tuple(self.block.operands.index(name) for name in names)

    @property
    def constants(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.block.operands) if name in TABLES)

    @property
    def bytes(self) -> int:
        """The memory traffic in bytes if each pass loads or stores each of its arrays once."""
        block = self.block
        arrays = [*block.operands, *block.results]
        if self.direction == "fwd+bwd":
            arrays += [*block.saved, *block.results, *(block.operands[i] for i in self.gradients)]
        return sum(math.prod(self.shape_of(n)) * ITEMSIZE[self.dtype_of(n)] for n in arrays)
