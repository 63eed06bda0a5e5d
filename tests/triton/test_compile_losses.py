"""Functions of logits compile for every GPU, with the schedules that the library chooses."""

import re

import numpy as np
import pytest
from specs import BF16, F16, F32, build_spec
from test_compile import GPUS, check, compile_call

from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton import support
from jaxnorm_kernels.triton.schedule import choose

# Numbers of columns. At some of these, several rows share a tile. At others, an unaligned row
# contains no complete block. The largest are sizes of vocabularies.
WIDTHS = [10, 1000, 3001, 32768, 50257, 128256, 262144]
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
CAPPED = {"logits_scale": 0.7, "logit_softcap": 30.0}
OTHER_CAPS = CAPPED | {"teacher_softcap": 20.0}
ENTROPY, KL = {"op": "log_prob_and_entropy"}, {"op": "kl_divergence"}
OF_BF16, OF_F32 = KL | {"teacher_dtype": BF16}, KL | {"teacher_dtype": F32}
# For each kind of loss, entries (dtype of the logits, options).
KINDS = {
    "loss": [(BF16, {}), (F32, SMOOTHED), (BF16, SMOOTHED), (F32, {}), (BF16, CAPPED)],
    "log_prob": [(BF16, ENTROPY), (F32, ENTROPY), (F32, ENTROPY | CAPPED)],
    "divergence": [(BF16, OF_BF16 | OTHER_CAPS), (F32, OF_F32), (BF16, OF_F32 | CAPPED)],
    "reverse": [
        (BF16, OF_BF16 | {"reverse": True}),
        (F32, OF_F32 | CAPPED | {"reverse": True}),
        (BF16, OF_F32 | OTHER_CAPS | {"reverse": True}),
    ],
}


def make_spec(direction, rows, cols, dtype, *, op="cross_entropy", **changes):
    options = {"want_stats": direction == "fwd", **changes}
    return build_spec(op, direction, rows, cols, dtype, F32, **options)


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_compile(kind, direction, cols):
    """For each width and each kind of loss, kernels are compiled with all entries of the kind.

    The entries take the GPUs in turn, so each of them is compiled for every GPU.
    """
    for turn, (dtype, options) in enumerate(KINDS[kind], WIDTHS.index(cols)):
        gpu = GPUS[[*GPUS][turn % len(GPUS)]]
        positions = {"has_positions": direction == "fwd" and turn % 2 == 0}
        spec = make_spec(direction, 8192, cols, dtype, **options, **positions)
        check(spec, gpu)
        (kernel,) = compile_call(spec, gpu)
        # If several rows share a tile, some of a thread's 16 values may spill.
        assert kernel.spilled <= (0 if cols > 4096 // len(spec.operand_dtypes) else 4 * 16)


@pytest.mark.parametrize("label_dtype", ["int8", "uint16", "uint32", "int64", "uint64"])
def test_labels_compile(label_dtype):
    for direction in ("fwd", "bwd"):
        compile_call(
            make_spec(direction, 8, 3000, F16), GPUS["sm_80"], label_dtype=np.dtype(label_dtype)
        )


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [32768, 50257])
def test_logits_are_read_and_written_16_bytes_at_a_time(cols, dtype):
    """Logits are loaded and stored 16 bytes at a time, except at the ends of unaligned rows.

    The forward loads them by asynchronous copies.
    """
    forward, backward = (
        compile_call(make_spec(direction, 8192, cols, dtype), GPUS["sm_80"])[0]
        for direction in ("fwd", "bwd")
    )
    copies = re.findall(r"cp\.async\.c[ag]", forward.ptx)
    assert copies
    assert {*copies} == {"cp.async.cg"}
    single = {2: "b16", 4: "b32"}[dtype.itemsize]
    is_aligned = cols * dtype.itemsize % 16 == 0
    for access in ("ld", "st"):
        kinds = re.findall(rf"{access}\.global[\w.:]*", backward.ptx)
        assert sum(".v4." in kind for kind in kinds) == 16 * dtype.itemsize // 16
        # Besides these vectors, the kernel loads four 4-byte numbers per row. If rows are
        # unaligned, the kernel has separate code for the ends of a row. This code loads the four
        # numbers again. It also loads and stores 16 elements one by one.
        ones = sum(kind == f"{access}.global.{single}" for kind in kinds)
        of_rows = 4 * (access == "ld" and single == "b32") * (1 if is_aligned else 2)
        assert ones == of_rows + (0 if is_aligned else 16)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [32768, 50257])
def test_both_logits_are_read_and_written_16_bytes_at_a_time(cols, dtype):
    """The logits are loaded and stored 16 bytes at a time. A thread has 8 values of each row."""
    options = {"op": "kl_divergence", "teacher_dtype": dtype}
    forward, backward = (
        compile_call(make_spec(direction, 8192, cols, dtype, **options), GPUS["sm_80"])[0]
        for direction in ("fwd", "bwd")
    )
    assert re.search(r"ld\.global[\w.:]*\.v4\.", forward.ptx)
    for access, arrays in (("ld", 2), ("st", 1)):
        kinds = re.findall(rf"{access}\.global[\w.:]*", backward.ptx)
        # In unaligned rows, only complete blocks of columns are accessed 16 bytes at a time.
        # Separate code accesses the other columns.
        assert sum(".v4." in kind for kind in kinds) == arrays * 8 * dtype.itemsize // 16


def test_parts_of_a_row_exchange_nothing_but_at_the_end():
    """Threads exchange values only at the end of a row.

    Therefore the number of exchanges hardly depends on the length of a row: a row of 128256 columns
    needs at most twice as many exchanges as a row of 512 columns, which one warp processes in one
    step.
    """
    wide, narrow = (
        compile_call(make_spec("fwd", 8192, cols, F32), GPUS["sm_80"])[0] for cols in (128256, 512)
    )
    assert wide.ptx.count("shfl") <= 2 * narrow.ptx.count("shfl")


def test_the_logarithm_is_accurate_near_1():
    """Kernels do not use the hardware's logarithm, whose error near 1 is 2^-22.

    A small loss would be lost in this error. The interpreter has a different logarithm, so only the
    compiled code shows which one a kernel uses.
    """
    for dtype in (BF16, F32):
        (kernel,) = compile_call(make_spec("fwd", 8192, 4096, dtype), GPUS["sm_80"])
        assert "lg2.approx" not in kernel.ptx


@pytest.mark.parametrize("options", [{}, {"op": "kl_divergence", "teacher_dtype": F32}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_programs_are_counted_as_support_counts_them(dtype, options):
    for gpu in GPUS.values():
        for cols in (1, 131, 2047, 2048, 2049, 4095, 4097, 50257, 128256, 262143):
            spec = make_spec("bwd", 512, cols, dtype, **options)
            schedule = choose(spec, gpu)
            blocks = schedules.loss_blocks(spec, schedule)
            assert (blocks - 1) * schedule.block < cols + schedules.loss_vector(spec, schedule)
            is_short = cols <= support.loss_block(spec)
            assert blocks <= (1 if is_short else cols // support.loss_block(spec) + 2)
            assert schedule.tile_rows == 1 or is_short
