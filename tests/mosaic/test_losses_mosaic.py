"""The kernels of functions of logits and labels: interpreted, lowered, and compiled for an H100."""

import functools
import itertools
import re
from typing import NamedTuple

import contract
import hlo
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import norms
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.sharding import PartitionSpec
from log_prob_cases import LogProbs
from loss_cases import CrossEntropy, operands
from programs import kernels_in, text_for_cuda
from reference import assert_within, exact, of_roundings, rounding
from specs import BF16, F16, F32, build_spec, changed

import jaxnorm
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.both import MOST_BYTES
from jaxnorm_kernels.mosaic.cross_entropy.forward import choose
from jaxnorm_kernels.mosaic.cross_entropy.passes import LossSchedule
from jaxnorm_kernels.mosaic.device.gpu import HOPPER
from jaxnorm_kernels.mosaic.rows.units import RowFragments

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PARTS = LossSchedule(2)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
CAP = {"logits_scale": 0.7, "logit_softcap": 8.0}
CAPPED = {**CAP, **SMOOTHED}


class Loss(NamedTuple):
    """A loss function.

    Attributes:
      function: the name of the public function.
      reference: the class that computes it in float64.
      options: options with which it is tested.
      results: the number of its results.
    """

    function: str
    reference: type
    options: dict
    results: int = 1


CE, LP = "cross_entropy", "log_prob_and_entropy"
LOSSES = {
    CE: Loss("softmax_cross_entropy_with_integer_labels", CrossEntropy, CAPPED),
    LP: Loss("log_prob_and_entropy", LogProbs, CAP, 2),
}
each_loss = pytest.mark.parametrize("op", LOSSES)


def make_spec(op, rows, cols, dtype, **options):
    return build_spec(op, "fwd", rows, cols, np.dtype(dtype), F32, want_stats=True, **options)


def run(module, spec, given, **schedule):
    """Run a pass of an implementation. `given` maps the names of its operands to arrays."""
    return contract.call(module, spec, *map(given.get, norms.names_of(spec)), **schedule)


def of_backward(x, results, stats, cotangents):
    """Return the operands that only the backward takes: a dict from their names to arrays."""
    names = dict(zip(("entropy", "dy", "dentropy"), (*results[1:], None, None)[:1] + cotangents))
    return {"saved": x, "stats": stats, **names}


@functools.lru_cache(maxsize=8)
def in_one_kernel(spec, schedule=None):
    """Return a function that runs both passes in one kernel. The gradient overwrites the logits."""
    spec = changed(spec, want_stats=False, wrt=("x",), gradient_dtype=spec.x_dtype)

    def both(x, labels, d, positions=None):
        operands = Operands(x, labels=labels, positions=positions)
        results, gradients = mosaic.both(operands, Results(d), spec, schedule=schedule)
        return results.y, gradients.x

    return jax.jit(both)


@functools.lru_cache(maxsize=8)
def forward_and_backward(spec, schedule=None, parts=PARTS, overwrites=False):
    """Return a function of logits, labels, cotangents and (if the spec has them) positions.

    It runs both passes. It is cached, so that calls with equal arguments compile once.
    """
    backward = changed(spec, direction="bwd", want_stats=False, overwrites_x=overwrites)
    count = LOSSES[spec.op].results

    def both(x, labels, *others):
        positions = others[count] if len(others) > count else None
        given = {"x": x, "labels": labels, "positions": positions}
        *results, stats = run(mosaic, spec, given, schedule=schedule)
        given |= of_backward(x, results, stats, others[:count])
        return *results, run(mosaic, backward, given, schedule=parts)[0]

    return jax.jit(both)


def cotangents(op, d):
    return (d, jnp.flip(d) - 0.3)[: LOSSES[op].results]


def check(
    op,
    x,
    labels,
    d,
    positions=None,
    *,
    program=forward_and_backward,
    schedule=None,
    padding=0,
    **options,
):
    """Run both passes in the interpreter and assert that the results are within their bounds.

    ``program(spec, schedule)`` returns the function that runs both passes.
    """
    rows, classes = x.shape
    has = {"has_positions": positions is not None, "padding": padding}
    spec = make_spec(op, rows, classes + padding, x.dtype, **has, **options)
    # The padding is filled with the dtype's largest number. It must not be added to any sum. Its
    # gradient must be 0, because later matmuls read it.
    wide = jnp.concatenate([x, jnp.full((rows, padding), jnp.finfo(x.dtype).max)], 1)
    d = cotangents(op, d)
    arrays = [a for a in (wide, labels, *d, positions) if a is not None]
    with mosaic.interpreted():
        *results, dx = program(spec, schedule)(*arrays)
    assert not dx[:, classes:].any()
    given = {"positions": positions, "dtype": x.dtype.name}
    expected = LOSSES[op].reference(x, labels, **given, **options)
    for ours, wanted, bound in zip(results, expected.results, expected.bounds, strict=True):
        assert_within(ours, wanted, bound)
    assert not any(np.any(exact(entropy) < 0) for entropy in results[1:])
    assert_within(dx[:, :classes], expected.gradient(*d), expected.gradient_bound(*d))


# A thread processes a row in steps of 16 bytes. The widths cover four cases: all steps are full;
# the last step is partial; rows are unaligned; a row has less than 16 bytes per thread.
@pytest.mark.parametrize(
    ("op", "cols", "dtype", "schedule", "options"),
    [
        (CE, 4096, "bfloat16", LossSchedule(2), {}),
        (CE, 4096, "bfloat16", LossSchedule(1, warpgroups=2), SMOOTHED),
        (CE, 2056, "float16", LossSchedule(1, warpgroups=2), {"z_loss": 0.1}),
        (CE, 3000, "float32", LossSchedule(2), SMOOTHED),
        (CE, 3001, "float32", LossSchedule(2), {}),
        (CE, 5003, "bfloat16", LossSchedule(1, warpgroups=2), SMOOTHED),
        (CE, 131, "float32", None, {}),
        (CE, 516, "bfloat16", None, {"label_smoothing": 1.0}),
        (CE, 1031, "bfloat16", None, {}),
        (CE, 2056, "bfloat16", LossSchedule(1, warpgroups=2), {"logit_softcap": 5.0}),
        (CE, 301, "float32", None, CAPPED),
        (CE, 515, "bfloat16", None, {"logits_scale": 1.5, "z_loss": 1e-2}),
        (LP, 4096, "bfloat16", LossSchedule(2), {}),
        (LP, 2056, "float16", LossSchedule(1, warpgroups=2), {"logits_scale": 1.5}),
        (LP, 3001, "float32", LossSchedule(2), {}),
        (LP, 5003, "bfloat16", LossSchedule(1, warpgroups=2), CAP),
        (LP, 301, "float32", None, CAP),
        (LP, 516, "bfloat16", None, {}),
    ],
    ids=str,
)
def test_values(op, cols, dtype, schedule, options):
    """Values and gradients are within their bounds.

    Unaligned rows may start at up to 8 offsets within a 16-byte word. If the number of columns is
    odd, the test has nine rows. Together, these rows start at all offsets.
    """
    check(op, *operands((9 if cols % 2 else 2, cols), dtype), schedule=schedule, **options)


@pytest.mark.parametrize(
    ("op", "cols", "dtype", "options"),
    [
        (CE, 1032, "bfloat16", {}),
        (CE, 301, "float32", SMOOTHED),
        (CE, 516, "bfloat16", {"logit_softcap": 8.0, **SMOOTHED}),
        (LP, 301, "float32", {}),
        (LP, 516, "bfloat16", {"logit_softcap": 8.0}),
    ],
    ids=str,
)
def test_a_scale_for_each_row(op, cols, dtype, options):
    """Each row may have its own scale, which may be negative or 0, and NaN in masked rows."""
    x, labels, d = operands((5, cols), dtype)
    d, positions = cotangents(op, d), jnp.arange(5) != 2
    scales = jnp.array([0.7, -1.5, jnp.nan, 3.0, 0.0])
    given = {"labels": labels, "logits_scale": scales}
    of_rows = Operands(x, positions=positions, **given)
    spec = make_spec(op, *x.shape, dtype, has_positions=True, has_scale=True, **options)

    def two_kernels():
        y = mosaic.forward(of_rows, spec)
        residuals = Residuals(x, stats=y.stats, entropy=y.entropy, **given)
        backward = changed(spec, direction="bwd", want_stats=False)
        return y, mosaic.backward(residuals, Results(d[0], entropy=d[-1]), backward)

    def one_kernel():
        one = changed(spec, want_stats=False, wrt=("x",), gradient_dtype=spec.x_dtype)
        return mosaic.both(of_rows, Results(d[0]), one)

    programs = [two_kernels, one_kernel] if op == CE and cols != 301 else [two_kernels]
    exact_scales = np.where(positions, exact(scales), 1)[:, None]
    expected = LOSSES[op].reference(
        x, labels, positions=positions, logits_scale=exact_scales, dtype=dtype, **options
    )
    for program in programs:
        with mosaic.interpreted():
            y, gradients = jax.jit(program)()
        results = (y.y, y.entropy)[: len(d)]
        assert not any(a[2].any() for a in (*results, gradients.x))
        for ours, wanted, bound in zip(results, expected.results, expected.bounds, strict=True):
            assert_within(ours, wanted, bound)
        assert_within(gradients.x, expected.gradient(*d), expected.gradient_bound(*d))


@pytest.mark.parametrize(
    ("cols", "padding", "dtype", "schedule", "options"),
    [
        (4096, 0, "bfloat16", LossSchedule(2), {}),
        (4096, 0, "bfloat16", LossSchedule(1, warpgroups=2), SMOOTHED),
        (2056, 0, "float16", LossSchedule(1, warpgroups=2), {"z_loss": 0.1}),
        (3000, 0, "float32", LossSchedule(2), SMOOTHED),
        (4089, 7, "bfloat16", None, {}),
        (2047, 1, "float32", LossSchedule(1, warpgroups=2), CAPPED),
        (1025, 7, "bfloat16", LossSchedule(1, warpgroups=2), CAPPED),
        (16384, 0, "bfloat16", None, {}),
    ],
    ids=str,
)
def test_one_kernel(cols, padding, dtype, schedule, options):
    """The kernel that computes both passes is accurate.

    Masked rows have a loss and a gradient of 0.
    """
    x, labels, d = operands((3, cols), dtype)
    given = {"program": in_one_kernel, "schedule": schedule, "padding": padding, **options}
    check(CE, x, labels.at[0].set(cols - 1), d, **given)
    positions = jnp.array([True, False, True])
    check(CE, x, labels.at[1].set(-1), d, positions, **given)


def test_one_kernel_is_both_passes():
    """The kernel that computes both passes returns the same results as two separate kernels.

    Some rows have a label out of range, infinite or NaN logits, or a masked position. The kernel
    may also return the gradient in another dtype than the logits.
    """
    x, labels, d = operands((8, 1032), "float32")
    labels = labels.at[0].set(-1).at[1].set(1032).at[2].set(-100)
    x = x.at[2].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf)
    x = x.at[5].set(0).at[5, (labels[5] + 1) % 1032].set(1e4).at[6].set(-jnp.inf)
    x = x.at[6, labels[6]].set(2)
    positions = jnp.arange(8) != 2
    spec = make_spec(CE, 8, 1032, "float32", has_positions=True)
    with mosaic.interpreted():
        loss, dx = in_one_kernel(spec)(x, labels, d.at[2].set(jnp.nan), positions)
        expected, *_, gradient = forward_and_backward(spec)(x, labels, d, positions)
    np.testing.assert_array_equal(loss, expected)
    # The backward kernel may round the statistics, and the arithmetic after them, in another way
    # than the kernel that computes both passes.
    assert_within(dx, exact(gradient), of_roundings(16, "float32", np.abs(exact(gradient))))
    one = changed(spec, want_stats=False, wrt=("x",), gradient_dtype=BF16)
    with mosaic.interpreted():
        operands_ = Operands(x, labels=labels, positions=positions)
        other = mosaic.both(operands_, Results(d), one)[1].x
    assert_within(other, exact(dx), rounding(exact(dx), "bfloat16"))


def check_linear_in_one_kernel(op, function, shapes, reduction, sharded):
    """Assert that one kernel computes both passes of a chunk's logits.

    `function` is a linear loss of arrays of these shapes. If `sharded`, it runs in `jax.shard_map`.
    """
    arrays = [jax.ShapeDtypeStruct((1, *shape), BF16) for shape in shapes]
    options = {"where": jnp.arange(6) != 2, "reduction": reduction, "chunk": 4}

    def program(implementation):
        def loss(*arrays):
            given = [a[0] for a in arrays]
            return jnp.sum(function(*given, **options, implementation=implementation))[None]

        def step(*arrays):
            y, vjp = jax.vjp(loss, *arrays)
            return y, *vjp(y)

        if not sharded:
            return step
        mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = PartitionSpec("devices")
        return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)

    for implementation, expected in {"mosaic": ["both"], None: ["both"], "xla": []}.items():
        text = text_for_cuda(program(implementation), *arrays)
        names = re.findall(rf"jaxnorm_{op}_(\w+)_mosaic_gpu", text)
        # With reduction "none", the kernel "both" runs only in the backward pass, because it needs
        # the cotangents. So in the forward pass, a kernel "fwd" computes the losses.
        assert names == ["fwd"] * (reduction == "none" and bool(expected)) + expected


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_loss_in_one_kernel(reduction, sharded):
    """One kernel computes the losses and the gradient of a chunk's logits."""
    loss = functools.partial(jaxnorm.linear_softmax_cross_entropy, labels=jnp.arange(6))
    check_linear_in_one_kernel(CE, loss, [(6, 16), (16, 1001)], reduction, sharded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_vocabulary(dtype):
    check(LP, *operands((2, 50257), dtype))


@each_loss
def test_rows_of_all_kinds(op):
    """Rows with bad labels, non-finite logits or masked positions have the correct results."""
    x, labels, d = operands((9, 515), "float32")
    labels = labels.at[0].set(-1).at[1].set(515).at[2].set(-100)
    x = x.at[2].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf)
    x = x.at[5, :-3].set(-jnp.inf).at[5, labels[5]].set(1).at[6].set(1e4).at[6, labels[6]].add(14)
    x = x.at[7].set(0).at[7, (labels[7] + 1) % 515].set(1e4).at[8].set(-jnp.inf)
    x = x.at[8, labels[8]].set(2)
    positions = jnp.arange(9) != 2
    spec = make_spec(op, 9, 515, "float32", has_positions=True)
    of_nan = [a.at[2].set(jnp.nan) for a in cotangents(op, d)]
    with mosaic.interpreted():
        *results, dx = forward_and_backward(spec)(x, labels, *of_nan, positions)
    for a in (results[0], dx.sum(-1)):
        assert np.isnan(a).tolist() == [True, True, False, True, True, *[False] * 4]
    for entropy in results[1:]:
        assert np.isnan(entropy).tolist() == [*[False] * 3, True, True, *[False] * 4]
    assert np.isnan(dx).all(-1).tolist() == np.isnan(results[0]).tolist()
    for a in (*results, np.abs(dx).max(-1)):
        assert (a[2], a[8]) == (0, 0)
    assert not any(entropy[7] for entropy in results[1:])
    # A log-probability whose cotangent is 0 has no gradient, even if its label is not a class.
    rows = jnp.array([0, 1, *range(5, 9)])
    check(op, x[rows], labels[rows], 3 * d.at[0].set(0)[rows])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int64", "uint64"])
def test_labels(dtype):
    """Labels may have any integer dtype, and may be outside the classes."""
    values = [0, 5, 127, 2**15, 2**31 + 5, 2**32 + 5, -(2**33) + 5]
    info = np.iinfo(dtype)
    x, _, d = operands((3, 256), "bfloat16")
    labels = np.array([v for v in values if info.min <= v <= info.max][-3:], dtype)
    with jax.enable_x64(True):
        check(CE, x, jnp.asarray(labels), d)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_classes_that_are_masked_by_the_lowest_number(dtype):
    """Classes may be masked by the dtype's lowest number.

    This also works if all classes that one thread loads are masked.
    """
    x, labels, d = operands((3, 2056), dtype)
    lowest = jnp.finfo(dtype).min
    x = x.at[0, :2000].set(lowest).at[1, 1000:].set(lowest).at[2, 1:].set(lowest)
    check(LP, x, labels.at[:2].set(jnp.array([2040, 3])), 3 * d, schedule=LossSchedule(1))


@pytest.mark.parametrize(
    ("op", "classes", "padding", "dtype", "options"),
    [
        (CE, 4089, 7, "bfloat16", {}),
        (CE, 2047, 1, "float32", SMOOTHED),
        (CE, 127, 1, "float32", {}),
        (CE, 1001, 30, "bfloat16", SMOOTHED),
        (CE, 301, 3, "float32", CAPPED),
        (LP, 4089, 7, "bfloat16", {}),
        (LP, 301, 3, "float32", CAP),
        (LP, 1001, 30, "bfloat16", {}),
        (LP, 50257, 7, "float32", {}),
    ],
    ids=str,
)
def test_padding(op, classes, padding, dtype, options):
    """Padding columns are not classes, and a label in the padding is out of range."""
    x, labels, d = operands((3, classes), dtype)
    labels = labels.at[0].set(classes - 1)
    check(op, x, labels, d, padding=padding, **options)
    if op == LP:
        return
    with mosaic.interpreted():
        spec = make_spec(op, 3, classes + padding, dtype, padding=padding, **options)
        wide = jnp.concatenate([x, x[:, :padding]], 1)
        loss, dx = forward_and_backward(spec)(wide, labels.at[1].set(classes), d)
    assert np.isnan(loss).tolist() == [False, True, False]
    assert np.isnan(dx).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("op", "cols", "dtype"),
    [
        *((CE, *of) for of in ((5003, "bfloat16"), (3000, "float32"), (131, "float32"))),
        *((LP, *of) for of in ((5003, "bfloat16"), (131, "float32"))),
    ],
)
def test_gradient_in_the_logits_place(op, cols, dtype):
    """If the gradient overwrites the logits, all results are bitwise the same."""
    x, labels, d = operands((9, cols), dtype)
    spec = make_spec(op, 9, cols, dtype, **(SMOOTHED if op == CE else {}))
    given = {"x": x, "labels": labels}
    *results, stats = jax.jit(functools.partial(run, xla, spec))(given)
    given |= of_backward(x, results, stats, cotangents(op, d))
    found = []
    for overwrites in (False, True):
        backward = changed(spec, direction="bwd", want_stats=False, overwrites_x=overwrites)
        call = jax.jit(functools.partial(run, mosaic, backward, schedule=PARTS))
        with mosaic.interpreted():
            dx, *_ = call(given)
        found.append(np.asarray(dx).view(np.uint8))
    np.testing.assert_array_equal(*found)


@each_loss
def test_no_races(op):
    for cols, dtype in ((2048, "bfloat16"), (1031, "float32")):
        x, labels, d = operands((2, cols), dtype)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            forward_and_backward(make_spec(op, 2, cols, dtype))(x, labels, *cotangents(op, d))
        assert not interpret_pallas_call.get_races().races_found
    if op == CE:
        x, labels, d = operands((2, 2048), "bfloat16")
        schedule = LossSchedule(1, warpgroups=2)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            in_one_kernel(make_spec(op, 2, 2048, BF16), schedule)(x, labels, d)
        assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("cols", [128, 131, 1000, 4099, 32768, 50257, 128256])
@pytest.mark.parametrize("vector", [4, 8])
def test_units_cover_a_row(cols, vector):
    units = RowFragments.of(cols, vector)
    for row in range(vector + 1):
        first = int(units.first(jnp.int32(row)))
        assert (row * cols + first) % units.vector == 0
        assert 0 <= first <= first + units.body <= cols
        assert units.body >= units.width
        # A row has unaligned ends exactly if the aligned part (`body`) does not contain all
        # elements.
        assert units.has_edges == (units.body < cols)
        assert first < 128
        assert cols - first - units.body < 128


def test_schedules():
    for dtype in (BF16, F32):
        for cols in (131, 1000, 32768, 50257, 128256, 262144):
            for rows in (1, 5, 66, 8192):
                schedule = choose(make_spec(CE, rows, cols, dtype), HOPPER)
                units = RowFragments.of(cols, 16 // dtype.itemsize)
                assert schedule.warpgroups * schedule.units <= max(units.count, 1)
    assert choose(make_spec(CE, 5, 128256, BF16), HOPPER) == LossSchedule(2, 4)


# The longest rows of bfloat16 logits of which one kernel computes both passes.
_LONGEST = MOST_BYTES // 2


def both_spec(op, cols):
    spec = make_spec(op, 8, cols, BF16)
    return changed(spec, want_stats=False, wrt=("x",), gradient_dtype=BF16)


@each_loss
def test_what_the_kernels_refuse(op):
    refusals = {
        "128 columns": make_spec(op, 8, 127, BF16),
        "mask of classes": make_spec(op, 8, 1000, BF16, has_mask=True),
        "float64": make_spec(op, 8, 1000, np.float64),
        "size 0": make_spec(op, 0, 1000, BF16),
        "parts than": changed(make_spec(op, 2**26, 2**18, BF16), direction="bwd"),
        "multiple of 16 bytes" if op == CE else "only cross-entropy": both_spec(op, 1001),
        "L2 cache" if op == CE else "only cross-entropy ": both_spec(op, _LONGEST + 8),
    }
    for words, spec in refusals.items():
        assert words in mosaic.why_unsupported(spec)
    assert mosaic.why_unsupported(make_spec(op, 8, 1000, BF16)) is None
    assert (mosaic.why_unsupported(both_spec(op, _LONGEST)) is None) == (op == CE)
    for dtype in ("bfloat16", "float32"):
        function = LOSSES[op].function
        plan = jaxnorm.implementation_for(function, (8192, 50257), dtype, platform="cuda")
        assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")


# -------------------------------------------------------------- lowered, or compiled for an H100


def types_of(spec, label_dtype="int32"):
    """Return the types of logits, labels, cotangents and (if the spec has them) positions."""
    types = dict(zip(norms.names_of(spec), norms.types_of(spec, np.dtype(label_dtype))))
    d = [jax.ShapeDtypeStruct(types["labels"].shape, F32)] * LOSSES[spec.op].results
    arrays = (types["x"], types["labels"], *d, types["positions"])
    return [a for a in arrays if a is not None]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("op", "rows", "cols", "dtype", "label_dtype"),
    [
        (CE, 5, 128256, BF16, "int32"),
        (CE, 512, 50257, F32, "int8"),
        (CE, 512, 4096, F16, "uint64"),
        (CE, 5, 50257, F16, "uint8"),
        (CE, 512, 50257, BF16, "int64"),
        (LP, 5, 128256, BF16, "int32"),
        (LP, 512, 50257, F32, "uint8"),
        (LP, 512, 4096, F16, "int64"),
    ],
    ids=str,
)
def test_lowers(op, rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        options = SMOOTHED if op == CE else CAP
        spec = make_spec(op, rows, cols, dtype, has_positions=True, **options)
        assert kernels_in(forward_and_backward(spec), *types_of(spec, label_dtype)) == 2


def test_programs():
    """Each pass is one kernel, even under `jax.vmap` and with `save_policy`."""
    types = [((8, 512, 32768), BF16), ((8, 512), "int32"), ((8, 512), bool)]
    x, labels, where = (jax.ShapeDtypeStruct(*of) for of in types)

    def loss(x, labels, where):
        function = jaxnorm.softmax_cross_entropy_with_integer_labels
        return jnp.sum(function(x, labels, where=where, implementation="mosaic"))

    for function in (
        loss,
        lambda *arrays: jnp.sum(jax.vmap(loss)(*arrays)),
        jax.checkpoint(loss, policy=jaxnorm.save_policy),
    ):
        assert kernels_in(jax.grad(function), x, labels, where) == 2


# With 64 registers per thread, four blocks fit into an SM; with 80 or 96, at least two do. Kernels
# need more than 64 if labels are smoothed, if logits are capped, or if a third sum is computed.
@pytest.mark.parametrize(
    ("op", "options", "registers"),
    [
        (CE, {}, 64),
        (CE, SMOOTHED, 96),
        (CE, {"logit_softcap": 30.0}, 80),
        (CE, CAPPED, 96),
        (LP, {}, 96),
        (LP, CAP, 96),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [*itertools.product((1000, 50257, 128256), (BF16, F32)), (50257, F16), (262144, F32)],
    ids=str,
)
def test_registers(cols, dtype, op, options, registers, compiler):
    spec = make_spec(op, 8192, cols, dtype, has_positions=bool(options), **options)
    backward, forward = compiler.compile(
        forward_and_backward(spec, parts=LossSchedule(4)), types_of(spec)
    )
    assert (forward.spilled, backward.spilled) == (0, 0)
    assert forward.registers <= registers
    assert backward.registers <= 96
    one = both_spec(op, cols)
    if mosaic.why_unsupported(one) is None:
        (kernel,) = compiler.compile(in_one_kernel(spec), types_of(spec))
        assert (kernel.spilled, kernel.registers <= 128) == (0, True)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("implementation", "has_scales"), [(None, False), (None, True), ("xla", False)]
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@each_loss
def test_nothing_else_of_the_logits_size(op, dtype, implementation, has_scales, compiler):
    """On a GPU, a program allocates only one array of the logits' size: the logits' gradient.

    By default the program is two kernels, even if each position has its own scale. With
    implementation="xla" it consists of fusions.
    """
    options = SMOOTHED if op == CE else {}
    function = functools.partial(
        getattr(jaxnorm, LOSSES[op].function), implementation=implementation, **options
    )

    def step(x, labels, scales, *d):
        scaled = {"logits_scale": scales} if has_scales else {}
        results, vjp = jax.vjp(lambda x: function(x, labels, **scaled), x)
        return results, *vjp(d if op == LP else d[0])

    shapes = [((8, 512, 50257), dtype), ((8, 512), np.int32)]
    shapes += [((8, 512), F32)] * (1 + LOSSES[op].results)
    arrays = [jax.ShapeDtypeStruct(s, t, sharding=compiler.sharding) for s, t in shapes]
    text = jax.jit(step).lower(*arrays).compile().as_text()
    made = hlo.made(text, 8 * 512 * 50257)
    assert made == (["custom-call"] if implementation is None else ["fusion"])


@pytest.mark.compiles
def test_a_slice_that_begins_anywhere_is_copied(compiler):
    """Kernels require aligned arrays, so XLA copies a slice before it passes it to a kernel."""
    rows, cols = 255, 50257
    x = jax.ShapeDtypeStruct((3, rows, cols), BF16, sharding=compiler.sharding)
    labels = jax.ShapeDtypeStruct((rows,), np.int32, sharding=compiler.sharding)
    cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels

    def static(x, labels):
        return cross_entropy(x[1], labels)

    def scanned(x, labels):
        return jax.lax.map(lambda x: cross_entropy(x, labels), x)

    for function in (static, scanned):
        text = jax.jit(function).lower(x, labels).compile().as_text()
        assert "mosaic_gpu" in text
        assert "dynamic-slice-fusion" not in text


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-4}, SMOOTHED, CAPPED], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols", "padding"),
    [(512, 50257, 7), (2048, 128256, 0), (300, 131, 5), (3000, 4096, 0)],
)
def test_one_kernel_on_a_gpu(rows, cols, padding, dtype, options):
    """One kernel returns the loss, and overwrites the logits by their gradient.

    The results of 16 rows are compared with float64.
    """
    x, labels, d = operands((rows, cols), dtype)
    x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=jnp.finfo(dtype).max)
    positions = jnp.arange(rows) % 7 != 3
    has = {"has_positions": True, "padding": padding}
    spec = make_spec(CE, rows, cols + padding, dtype, **options, **has)
    if mosaic.why_unsupported(changed(spec, want_stats=False, wrt=("x",), gradient_dtype=x.dtype)):
        return  # Rows of 128256 float32 numbers are too long for the L2 cache.
    loss, dx = in_one_kernel(spec)(x, labels, d, positions)
    assert not loss[3::7].any()
    assert not dx[3::7].any()
    assert not dx[:, cols:].any()
    some = np.linspace(0, rows - 1, 16).astype(int)
    x, labels, d, positions, loss, dx = (a[some] for a in (x, labels, d, positions, loss, dx))
    expected = CrossEntropy(x[:, :cols], labels, positions=positions, dtype=dtype, **options)
    assert_within(loss, expected.loss, expected.loss_bound())
    assert_within(dx[:, :cols], expected.gradient(d), expected.gradient_bound(d))


@pytest.mark.gpu
@pytest.mark.parametrize("label_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(512, 50257), (2048, 128256), (300, 131)])
@each_loss
def test_gradient_in_the_logits_place_on_a_gpu(op, rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        x, labels, d = operands((rows, cols), dtype)
        spec = make_spec(op, rows, cols, dtype)
        results = [
            forward_and_backward(spec, overwrites=overwrites)(
                x, labels.astype(label_dtype), *cotangents(op, d)
            )
            for overwrites in (False, True)
        ]
        for a, b in zip(*results, strict=True):
            assert jnp.array_equal(a, b)
            assert not jnp.isnan(a).any()
