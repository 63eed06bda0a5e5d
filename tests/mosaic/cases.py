"""Calls and schedules of Mosaic's kernels, and checks of their values in Pallas' interpreter.

The interpreter runs on the CPU. It models neither layouts nor alignment nor clusters. In names of
cases, "ring" stands for the schedule `PipelinedRows`, and "rows_ring" for `PipelinedNarrowRows`. In
both, rows pass through a ring of stages in shared memory.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import contract
import jax
import jax.numpy as jnp
import norms
import numpy as np
import pytest
import reference
from pairs import pairwise
from programs import kernels_in
from reference import ACTIVATIONS, exact
from specs import BF16, F16, F32, build_spec

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS
from jaxnorm_kernels.specs import Spec

# ------------------------------------------------------------------------------------- schedules


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, with numbers of rows and columns that exercise its special cases.

    `schedule.vector`, the number of elements that a thread loads at once, is 8 (for 16-bit arrays)
    or 1.
    """

    name: str
    rows: int
    cols: int
    schedule: Any

    def schedule_for(self, spec: Spec) -> Any:
        """Return the schedule with a `vector` that is 16 bytes long in the widest dtype.

        A schedule whose vector is 1 is returned unchanged.
        """
        if self.schedule.vector == 1:
            return self.schedule
        dtypes = [spec.x_dtype, spec.y_dtype, *map(spec.dtype, ("residual", "gate"))]
        widest = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        return dataclasses.replace(self.schedule, vector=16 // widest)


# A row is processed in fragments (ranges of columns). In the cases whose names end in "tail", the
# last fragment overlaps the previous one. In the other cases, the fragments are disjoint.
_TILES = (
    Case("rows_in_warps", 9, 512, TileSchedule("row_tile", 8, rows=4)),
    Case("rows_in_warps_tail", 9, 440, TileSchedule("row_tile", 8, rows=8)),
    Case("rows_in_parts_of_warps", 35, 72, TileSchedule("row_tile", 8, rows=32, threads=4)),
    Case("same_row_in_all_warps", 3, 24, TileSchedule("row_tile", 8, rows=1, threads=2)),
    Case("warpgroup_row", 2, 2048, TileSchedule("warpgroup_row", 8)),
    Case("warpgroup_row_tail", 2, 3000, TileSchedule("warpgroup_row", 8)),
    Case("split_row", 2, 4096, TileSchedule("split_row", 8, warpgroups=2)),
    Case("split_row_tail", 2, 2571, TileSchedule("split_row", 1, warpgroups=4)),
)


def _pipelined(kind: str, **sizes: Any) -> TileSchedule:
    return TileSchedule(f"pipelined_{kind}", 8, **sizes)  # type: ignore[arg-type]


#: Schedules of forwards. In the first one with a pipeline, three tiles have 4 rows each, the third
#: tile overlaps the second, and the first block has two tiles.
FORWARD = (
    *_TILES,
    Case("tiles", 11, 512, _pipelined("tile", rows=4, slots=2, tiles=2, params_first=True)),
    Case("tiles_tail", 17, 440, _pipelined("tile", rows=8, slots=1, tiles=3, rereads=True)),
    Case("rows", 5, 4096, _pipelined("row", warpgroups=2, slots=2, tiles=3)),
    Case("rows_with_tail", 6, 4096, _pipelined("row", warpgroups=2, slots=1, tiles=2, tail=3)),
    Case("rows_tail", 4, 3000, _pipelined("row", slots=3, tiles=4, params_first=True)),
    Case("rows_that_reread", 3, 3000, _pipelined("row", slots=2, tiles=3, rereads=True)),
)
SOFTMAX_BACKWARD = _TILES
#: Schedules of the backwards of norms. Each case has so many rows that two persistent blocks reuse
#: the stages of their rings. One of the two blocks has more rows than the other.
BACKWARD = (
    Case("ring", 11, 2048, PipelinedRows(8, 1, stages=3)),
    Case("ring_two_stages", 7, 2048, PipelinedRows(8, 1, stages=2)),
    Case("ring_tail", 7, 1504, PipelinedRows(8, 1, stages=2)),
    Case("ring_two_warpgroups", 9, 4096, PipelinedRows(8, 2, stages=3)),
    Case("ring_two_warpgroups_tail", 5, 3000, PipelinedRows(8, 2, stages=3)),
    Case("ring_rows", 11, 1024, PipelinedRows(8, 1, stages=2, rows=4)),
    Case("ring_rows_tail", 14, 3000, PipelinedRows(8, 2, stages=2, rows=2)),
    Case("ring_more_stages", 9, 1024, PipelinedRows(8, 1, stages=4)),
    Case("ring_three_warpgroups", 5, 6144, PipelinedRows(8, 3, stages=2)),
    Case("ring_four_warpgroups", 5, 4096, PipelinedRows(8, 4, stages=3)),
    Case("rows_ring", 23, 512, PipelinedNarrowRows(8, 32, rows=8, stages=2)),
    Case("rows_ring_tail", 13, 440, PipelinedNarrowRows(8, 32, rows=4, stages=3)),
    Case("rows_ring_parts_of_warps", 70, 64, PipelinedNarrowRows(8, 4, rows=32, stages=2)),
)
BY_NAME = {case.name: case for case in (*FORWARD, *BACKWARD)}

# Schedules in which the blocks of a cluster process a row together. The interpreter cannot run
# them.
CLUSTERED_FORWARD = (
    Case("split_row", 2, 16384, TileSchedule("split_row", 8, cluster=4)),
    Case("split_row_tail", 2, 5571, TileSchedule("split_row", 1, warpgroups=2, cluster=8)),
    Case("rows", 5, 16384, _pipelined("row", warpgroups=2, cluster=2, slots=2, tiles=3)),
    Case("rows_tail", 5, 9000, _pipelined("row", cluster=8, slots=2, tiles=3, rereads=True)),
)
CLUSTERED_BACKWARD = (
    Case("cluster_of_2", 9, 16384, PipelinedRows(8, 2, stages=3, cluster=2)),
    Case("cluster_of_2_rows", 9, 8192, PipelinedRows(8, 2, stages=3, rows=2, cluster=2)),
    Case("cluster_of_4_tail", 9, 9000, PipelinedRows(8, 1, stages=3, cluster=4)),
    Case("cluster_of_8", 9, 65536, PipelinedRows(8, 4, stages=3, cluster=8)),
    Case("cluster_of_16", 9, 131072, PipelinedRows(8, 2, stages=3, cluster=16)),
)
CLUSTERED_SOFTMAX_BACKWARD = (
    Case("row_in_2_blocks", 3, 16384, TileSchedule("split_row", 8, warpgroups=2, cluster=2)),
    Case("row_in_4_blocks_tail", 3, 9001, TileSchedule("split_row", 1, cluster=4)),
    Case("row_in_16_blocks", 3, 131072, TileSchedule("split_row", 8, warpgroups=2, cluster=16)),
)


def schedules_of(spec: Spec, *, clustered: bool = False) -> tuple[Case, ...]:
    """Return the cases whose schedules suit a pass; `clustered` adds those with clusters."""
    if spec.direction == "fwd":
        return FORWARD + CLUSTERED_FORWARD * clustered
    if spec.is_norm:
        return BACKWARD + CLUSTERED_BACKWARD * clustered
    return SOFTMAX_BACKWARD + CLUSTERED_SOFTMAX_BACKWARD * clustered


# ----------------------------------------------------------------------------------------- calls

#: Shapes of the benchmarks, odd shapes, and shapes with few rows. Some widths are limits at which a
#: schedule table changes from one rule to the next.
SHAPES = [
    *((32768, 128), (32768, 768), (32768, 1024), (32768, 4096), (8192, 5120), (16384, 8192)),
    *((8192, 12288), (8192, 16384), (4096, 32768), (4096, 65536), (1024, 131072)),
    *((8192, 1000), (8192, 4095), (8192, 50257), (1, 4096), (4096, 2048), (8192, 3000)),
    *((8192, 7168), (128, 8192), (1, 65536), (3, 1024), (100, 8), (1, 100), (2, 300)),
]


def make_spec(
    function: str, direction: str, rows: int, cols: int, mix: Sequence[np.dtype], **given: Any
) -> Spec:
    """Return the spec of a pass of a public function.

    Args:
      function: the function's name, followed by " with a gate" if it has ``gate=``.
      mix: the dtypes of x, of the residual or the gate (if there are three dtypes), and of y.
      given: fields of a `Spec`, or flags of `build_spec`.
    """
    name, _, gate = function.partition(" with a ")
    entry, (x, *second, y) = FUNCTIONS[name], mix
    op = entry.gated if gate else entry.op
    if OPERATIONS[op].family == "softmax":
        return build_spec(op, direction, rows, cols, x, y, **given)  # type: ignore[arg-type]
    kind = "layer_norm" if entry.subtract_mean else "rms_norm"
    mix = (x, *(second or [x]), y)
    spec: Spec = norms.make_spec(op, direction, rows, cols, mix, kind, **given)
    return spec


class Family(NamedTuple):
    """Calls with which a kind of kernel is tested.

    Attributes:
      functions: names of functions, as `make_spec` takes them.
      mixes: the combinations of dtypes.
      options: a dict from the name of each option to its values.
      changes: dicts of further options. For each dict, a test changes the default call by these
        options.
      given: options that all calls of this family have.
    """

    functions: Sequence[str]
    mixes: Sequence[tuple[np.dtype, ...]]
    options: dict[str, Sequence[Any]] = {}  # noqa: RUF012
    changes: Sequence[dict[str, Any]] = ()
    given: dict[str, Any] = {}  # noqa: RUF012

    def spec(self, direction: str, rows: int, cols: int, **given: Any) -> Spec:
        given = {"function": self.functions[0], "mix": self.mixes[0], **self.given, **given}
        function, mix = given.pop("function"), given.pop("mix")
        return make_spec(function, direction, rows, cols, mix, **given)

    def combinations(self) -> list[dict[str, Any]]:
        """Return combinations of options in which each pair of two options' values occurs."""
        options = {"function": self.functions, "mix": self.mixes, **self.options}
        return [dict(zip(options, values)) for values in pairwise(*options.values())]


_SAVED = {"saved": ["output", "input"]}
_OF_ONE = [(BF16, BF16), (F32, F32), (BF16, F32), (F32, F16), (F32, BF16), (F16, F16)]
_OF_TWO = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
_NO_PARAMETERS = {"scale_dtype": None, "bias_dtype": None}
FAMILIES = {
    "softmax": Family(["softmax", "log_softmax"], _OF_ONE),
    "norm": Family(
        ["layer_norm", "rms_norm"],
        _OF_ONE,
        _SAVED,
        [
            _NO_PARAMETERS,
            {"scale_dtype": None, "want_stats": False},
            {"bias_dtype": None, "scale_offset": 1.0},
            {"scale_dtype": BF16, "bias_dtype": F16, "saved": "input"},
            {"scale_dtype": F16, "bias_dtype": BF16},
        ],
    ),
    "norm with dh": Family(
        ["rms_norm", "layer_norm"],
        [(BF16, BF16), (F32, BF16), (BF16, F32), (F32, F32)],
        _SAVED,
        [{"scale_dtype": None}, {"scale_groups": 2, "bias_dtype": None}],
        {"adds_dh": True},
    ),
    "activation": Family(
        ["layer_norm", "rms_norm"],
        _OF_ONE[:4],
        {"activation": ACTIVATIONS},
        [_NO_PARAMETERS, {"scale_offset": 1.0, "bias_dtype": BF16}, {"adds_dh": True}],
        {"saved": "input", "activation": "silu"},
    ),
    "residual": Family(
        ["add_layer_norm", "add_rms_norm"],
        [*_OF_TWO, (BF16, F16, BF16)],
        _SAVED,
        [{"scale_offset": 1.0, "want_stats": False}, _NO_PARAMETERS],
    ),
    "scaled sum": Family(
        ["add_layer_norm with a gate", "add_rms_norm with a gate"],
        _OF_TWO,
        _SAVED,
        [_NO_PARAMETERS, {"scale_offset": 1.0, "branch_scale_dtype": BF16}]
        + [{"scale_groups": a, "bias_groups": a, "branch_scale_groups": b} for a, b in [(2, 1)]]
        + [{"branch_scale_groups": 2}],
    ),
    "post-norm": Family(
        ["rms_norm_add"], _OF_TWO, changes=[{"scale_offset": 1.0}, {"scale_dtype": None}]
    ),
    "two norms": Family(
        ["rms_norm_add_rms_norm"],
        [*_OF_TWO[:3], (F32, BF16, BF16)],
        _SAVED,
        [
            {"adds_dh": False},
            {"scale_dtype": None},
            {"next_scale_dtype": None},
            {"scale_offset": 0.25, "scale_dtype": BF16},
        ],
    ),
    "gate": Family(
        ["rms_norm_gated"],
        _OF_TWO,
        {"norm_before_gate": [True, False], "activation": ACTIVATIONS},
        [
            change | {"norm_before_gate": before}
            for change in ({"scale_dtype": None}, {"scale_offset": 1.0}, {"scale_dtype": BF16})
            for before in (True, False)
        ],
    ),
}


def grouped(spec: Spec, groups: int) -> dict[str, int]:
    """Return the fields of `spec` in which each group of rows has its own parameters."""
    present = [name for name in ("scale", "bias", "branch_scale") if spec.dtype(name) is not None]
    return {f"{name}_groups": groups for name in present}


def passes(family: str) -> tuple[str, ...]:
    """Return the tested passes of a family.

    The backward of a post-norm is that of a plain norm. h's cotangent exists only in backwards.
    """
    return {"norm with dh": ("bwd",), "post-norm": ("fwd",)}.get(family, ("fwd", "bwd"))


def each_pass() -> Iterator[tuple[str, str]]:
    yield from ((family, direction) for family in FAMILIES for direction in passes(family))


# ----------------------------------------------------------------------------------------- values


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backward kernels with two persistent blocks.

    Two blocks suffice to test sums over blocks, and take the interpreter little time.
    """
    monkeypatch.setattr(norm_backward, "persistent_blocks", lambda spec, schedule: 2)


def run(spec: Spec, *operands: Any, schedule: Any = None, params: Any = None) -> Any:
    """Run a pass in the interpreter."""
    given = {} if schedule is None else {"schedule": schedule}
    with mosaic.interpreted(params):
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, **given))(*operands)


def operands_of(spec: Spec) -> tuple[Any, ...]:
    """Return the arrays that a pass takes, in the order of `contract.call`."""
    if not spec.is_norm:
        return softmax_operands(spec)
    if spec.direction == "bwd":
        return tuple(norms.backward_operands(spec)[2])
    arrays = norms.make_operands(spec)
    return tuple(arrays[name] for name in norms.names_of(spec))


def check(spec: Spec, schedule: Any = None, params: Any = None) -> None:
    """Run a pass in the interpreter and assert that its results are within their bounds."""
    check_call(functools.partial(run, schedule=schedule, params=params), spec)


def check_call(call: Any, spec: Spec) -> None:
    """Assert that the results of ``call(spec, *operands)`` are within their bounds."""
    if not spec.is_norm:
        operands = operands_of(spec)
        norms.assert_computes_pass(call(spec, *operands), spec, operands)
        return
    arrays = norms.make_operands(spec)
    # The kernel replaces scales of 0 by a floor, from which it can recover x. Next to a bias, it
    # could not, so these columns have a bias of 0.
    for name in ("scale", "bias"):
        if arrays.get(name) is not None:
            arrays[name] = arrays[name].at[..., ::7].set(0)
    checked = norms.check_forward if spec.direction == "fwd" else norms.check_backward
    checked(call, spec, arrays)


def softmax_operands(spec: Spec) -> tuple[Any, ...]:
    rng, shape = np.random.default_rng(0), (spec.rows, spec.cols)
    x, d = (jnp.asarray(rng.normal(0.5, 3, shape), a) for a in (spec.x_dtype, spec.y_dtype))
    if spec.direction == "fwd":
        return (x,)
    y = reference.softmax(exact(x), -1, log=spec.op == "log_softmax")
    return jnp.asarray(y, spec.y_dtype), None, d


# --------------------------------------------------------------------------------------- lowering


def assert_lowers(spec: Spec, schedule: Any = None) -> None:
    """Assert that a pass lowers to one kernel for an NVIDIA GPU.

    Lowering includes Mosaic's layout inference, so this also tests that the inference succeeds. By
    default, a backward of two norms has two kernels if the registers cannot hold its columns.
    """
    kernels, given = 1, {} if schedule is None else {"schedule": schedule}
    if schedule is None:
        assert mosaic.why_unsupported(spec) is None
        if spec.op == "norm_add_norm" and spec.direction == "bwd" and spec.cols > 2**16:
            kernels = 2
    call = functools.partial(contract.call, mosaic, spec, **given)
    assert kernels_in(call, *norms.types_of(spec)) == kernels
