"""Every schedule of the kernels lowers for an NVIDIA GPU, in every dtype; refused calls say why.

Lowering runs Mosaic's layout inference and lowers to the vector and LLVM dialects, which detects
layouts that do not fit an operation. No GPU is needed. The later steps (LLVM, ptxas) are tested in
`test_every_gpu`. The tests run over the table `cases.FAMILIES`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES, SHAPES, Case, assert_lowers, each_pass, grouped, make_spec, schedules_of
from specs import BF16, F32, changed

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.oldest_jax


def each_schedule() -> Iterator[Any]:
    """Yield each pass of each family with each schedule that suits it."""
    for family, direction in each_pass():
        of, combinations = FAMILIES[family], FAMILIES[family].combinations()
        clustered = direction == "fwd" or family in ("softmax", "norm")
        for i, case in enumerate(schedules_of(of.spec(direction, 8, 64), clustered=clustered)):
            given = combinations[5 * i % len(combinations)]
            spec = of.spec(direction, case.rows, case.cols, **given)
            name = "-".join([family, direction, case.name, *map(str, given.values())])
            yield pytest.param(spec, case, id=name)


@pytest.mark.parametrize(("spec", "case"), [*each_schedule()])
def test_schedules_lower(spec: Spec, case: Case) -> None:
    assert_lowers(spec, case.schedule_for(spec))


def test_a_layout_that_does_not_fit_is_found() -> None:
    """Lowering rejects a layout that does not fit an operation.

    So the tests that lower kernels fail if a kernel uses a wrong layout.
    """
    spec = make_spec("softmax", "fwd", 4, 512, (BF16, BF16))
    for schedule, message in (
        (TileSchedule("warpgroup_row", 8), "holds rows of"),
        (TileSchedule("row_tile", 8, rows=2, threads=128), "threads of one warp"),
        (TileSchedule("row_tile", 8, rows=6), "height of 1 or"),
    ):
        with pytest.raises(ValueError, match=message):
            assert_lowers(spec, schedule)


def each_shape() -> Iterator[Any]:
    """Yield each pass of each family in each shape that kernels support.

    Successive shapes have successive combinations of options, so that all combinations occur.
    """
    for family, direction in each_pass():
        of, combinations = FAMILIES[family], FAMILIES[family].combinations()
        for i, (rows, cols) in enumerate(SHAPES):
            if family != "softmax" and (cols < 8 or (direction == "bwd" and cols % 8)):
                continue
            if direction == "bwd" and rows < 64 and cols < 512:  # refused
                continue
            given = combinations[3 * i % len(combinations)]
            name = "-".join([family, direction, str(rows), str(cols), *map(str, given.values())])
            yield pytest.param(of.spec(direction, rows, cols, **given), id=name)


@pytest.mark.parametrize("spec", [*each_shape()])
def test_default_schedules_lower(spec: Spec) -> None:
    assert_lowers(spec)


@pytest.mark.parametrize(
    ("groups", "rows", "cols"),
    [(8, 8192, 128), (16, 4096, 768), (16, 16 * 197, 768), (8, 8192, 4096), (6, 384, 32768)],
)
@pytest.mark.parametrize(
    "function", ["layer_norm", "add_layer_norm", "add_layer_norm with a gate", "rms_norm_gated"]
)
def test_groups_of_rows_lower(groups: int, rows: int, cols: int, function: str) -> None:
    for direction in ("fwd", "bwd"):
        spec = make_spec(function, direction, rows, cols, (BF16, BF16))
        assert_lowers(changed(spec, **grouped(spec, groups)))
        assert_lowers(changed(spec, scale_groups=groups))


def test_large_arrays_are_addressed_with_64_bits() -> None:
    """Arrays of more than 2^31 elements are supported, because offsets are computed in 64 bits."""
    spec = make_spec("softmax", "fwd", 70000, 65536, (BF16, BF16))
    assert spec.rows * spec.cols > 2**31
    assert_lowers(spec)


# ------------------------------------------------------------------------------------- refusals

FLOAT64 = np.dtype(np.float64)
BACKWARD = {"direction": "bwd", "rows": 256}
SHORT = ({"direction": "bwd", "rows": 32, "cols": 64}, "needs at least 64 rows this short")
UNALIGNED = "multiple of 16 bytes"
LONG = "support no rows of this length"
#: Maps each family to changes of a supported forward, each with a part of the refusal's sentence.
REFUSED: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    "softmax": [
        ({"has_mask": True}, "some normalised axes but not all"),
        ({"has_mask": True, "mask_rows": Shared(((4, True),), True)}, None),
        ({"logits_bias_dtype": BF16}, "some normalised axes but not all"),
        ({"logits_bias_dtype": FLOAT64}, "float64"),
        ({"causal": True, "queries": 4}, None),
        ({"causal": True, "queries": 4, "queries_over": ("i",)}, "are sharded"),
        (BACKWARD | {"cols": 2**18}, None),
        (BACKWARD | {"cols": 2**19}, LONG),
    ],
    "norm": [
        ({"x_dtype": FLOAT64}, "float64"),
        ({"rows": 0}, "size 0"),
        ({"cols": 0}, "size 0"),
        ({"cols": 1}, "8 elements"),
        ({"rows": 2**31}, "32-bit indices"),
        ({"rows": "b"}, "symbolic"),
        ({"scale_groups": 2, "bias_groups": 2}, None),
        ({"scale_groups": 2, "bias_groups": 4}, "different sizes"),
        (BACKWARD | {"scale_groups": 2, "cols": 4096}, None),
        (BACKWARD | {"scale_groups": 64, "cols": 256}, "in each of the groups"),
        (BACKWARD | {"adds_dh": True, "cols": 4096}, None),
        ({"cols": 2**18}, None),
        ({"cols": 2**18 + 8}, LONG),
        (BACKWARD | {"cols": 2**17}, None),
        (BACKWARD | {"cols": 2**17 + 8}, LONG),
        (BACKWARD | {"cols": 50257}, UNALIGNED),
        SHORT,
    ],
    # Rows of dh may not be a multiple of 16 bytes, although rows of the other arrays are.
    "norm with dh": [(BACKWARD | {"x_dtype": BF16, "y_dtype": F32, "cols": 4100}, UNALIGNED)],
    "activation": [SHORT, (BACKWARD | {"cols": 1024, "stat_cotangents": True}, "only plain JAX")],
    "residual": [
        ({"residual_dtype": FLOAT64}, "float64"),
        ({"cols": 50257}, None),
        (BACKWARD | {"cols": 50257}, UNALIGNED),
    ],
    "scaled sum": [
        SHORT,
        ({"cols": 7}, "rows of at least 8 elements"),
        ({"scattered": True}, "not consecutive"),
        ({"cols": 2**19}, LONG),
        ({"scale_groups": 2, "branch_scale_groups": 4}, "groups of different sizes"),
        (BACKWARD | {"cols": 1024, "stat_cotangents": True}, "only plain JAX"),
        (BACKWARD | {"cols": 1024, "unused": "y"}, "only plain JAX"),
        ({"branch_scale_dtype": FLOAT64}, "float64"),
        (BACKWARD | {"cols": 100, "saved": "input", "residual_dtype": F32}, UNALIGNED),
    ],
    "post-norm": [
        ({"cols": 50257}, None),
        ({"residual_dtype": F32, "cols": 2**17}, None),
        ({"residual_dtype": F32, "cols": 2**17 + 8}, LONG),
    ],
    "two norms": [
        ({"cols": 50257}, None),
        (BACKWARD | {"cols": 50257}, UNALIGNED),
        (BACKWARD | {"cols": 262144}, LONG),
    ],
    "gate": [
        SHORT,
        (BACKWARD | {"cols": 1024, "stat_cotangents": True}, "only plain JAX"),
        ({"gate_dtype": FLOAT64}, "float64"),
        (BACKWARD | {"cols": 8191}, UNALIGNED),
    ],
}


@pytest.mark.parametrize(
    ("family", "change", "part"),
    [(family, *refusal) for family, refusals in REFUSED.items() for refusal in refusals],
    ids=str,
)
def test_refusals(family: str, change: dict[str, Any], part: str | None) -> None:
    """Each call is refused for a reason, unless the reason is None."""
    flags = {name: change[name] for name in change if name not in ("direction", "rows", "cols")}
    spec = FAMILIES[family].spec(
        change.get("direction", "fwd"), *(change.get(n, d) for n, d in (("rows", 4), ("cols", 128)))
    )
    refusal = mosaic.why_unsupported(changed(spec, **flags))
    assert refusal is None if part is None else part in str(refusal)


# --------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("rows", [("data",), ()], ids=["varying", "alike"])
@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        ("softmax_cross_entropy", "jaxnorm_cross_entropy_bwd"),
        ("log_prob_and_entropy", "jaxnorm_log_prob_and_entropy_bwd"),
        ("kl_divergence", "jaxnorm_kl_divergence_bwd"),
    ],
)
def test_logits_give_way_to_their_gradient_on_explicit_axes(
    rows: tuple[str, ...], function: str, kernel: str
) -> None:
    """A linear loss lowers on a mesh, with sharded rows and without.

    If rows are not sharded, the logits' gradient overwrites the logits. If rows are sharded, the
    logits vary over a mesh axis. Pallas cannot write to such an array, so the gradient is a new
    array.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        of = getattr(jaxnorm, f"linear_{function}")
        targets = (2 * x, weight) if function == "kl_divergence" else (labels,)
        results = of(x, weight, *targets, chunk=96, implementation="mosaic")
        return sum(map(jnp.sum, jax.tree.leaves(results)), jnp.float32(0))

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(*rows))
        x = jax.ShapeDtypeStruct((512, 256), F32, sharding=sharding)
        labels = jax.ShapeDtypeStruct((512,), np.int32, sharding=sharding)
        weight = jax.ShapeDtypeStruct((256, 4096), F32)
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, weight, labels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert kernel in text
