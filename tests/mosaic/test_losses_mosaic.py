"""The kernels of losses: interpreted, lowered, and compiled for an H100.

The losses are the cross-entropy, log-probabilities with entropies, and the KL divergence. The file
`test_divergence.py` has the values of the divergence.
"""

import functools
import itertools
from typing import NamedTuple

import hlo
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from loss_cases import CrossEntropy, LogProbs, operands
from programs import kernels_in
from reference import assert_within, exact
from specs import BF16, F16, F32, build_spec, changed

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.forward import choose
from jaxnorm_kernels.mosaic.cross_entropy.passes import LossSchedule
from jaxnorm_kernels.mosaic.device.gpu import HOPPER
from jaxnorm_kernels.mosaic.rows.units import RowFragments

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PARTS = LossSchedule(2)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
CAP = {"logits_scale": 0.7, "logit_softcap": 8.0}
CAPPED = {**CAP, **SMOOTHED}
CAPS = {**CAP, "teacher_softcap": 8.0}


class Loss(NamedTuple):
    """A loss function.

    Attributes:
      function: the name of the public function.
      other: the name of the operand after the logits.
      options: options with which it is tested.
      reference: the class that computes it in float64, if this file tests its values.
      results: the number of its results.
    """

    function: str
    other: str
    options: dict
    reference: type | None = None
    results: int = 1


CE, LP, KL = "cross_entropy", "log_prob_and_entropy", "kl_divergence"
LOSSES = {
    CE: Loss("softmax_cross_entropy_with_integer_labels", "labels", CAPPED, CrossEntropy),
    LP: Loss("log_prob_and_entropy", "labels", CAP, LogProbs, 2),
    KL: Loss("kl_divergence", "teacher_logits", CAPS),
}
of_labels = pytest.mark.parametrize("op", [CE, LP])
each_loss = pytest.mark.parametrize("op", LOSSES)


def make_spec(op, rows, cols, dtype, **options):
    dtype = np.dtype(dtype)
    if op == KL:
        options = {"teacher_dtype": dtype} | options
    return build_spec(op, "fwd", rows, cols, dtype, F32, want_stats=True, **options)


@functools.lru_cache(maxsize=8)
def both_passes(spec, schedule=None, parts=PARTS, gradient_dtype=None):
    """Return a function that runs both passes, and returns the results and the logits' gradient.

    The function takes the logits, the labels or the teacher's logits, a tuple with a cotangent for
    each result, and optional operands. If `gradient_dtype` is the logits' dtype, the gradient may
    overwrite the logits. The function is cached, so that calls with equal arguments compile once.
    """
    backward = changed(spec, direction="bwd", want_stats=False, gradient_dtype=gradient_dtype)
    loss = LOSSES[spec.op]

    def run(x, other, cotangents, positions=None, logits_scale=None):
        given = {loss.other: other, "logits_scale": logits_scale}
        found = mosaic.forward(Operands(x, positions=positions, **given), spec, schedule=schedule)
        saved = Residuals(x, stats=found.stats, y=found.y, entropy=found.entropy, **given)
        of_results = Results(cotangents[0], entropy=cotangents[-1])
        gradients = mosaic.backward(saved, of_results, backward, schedule=parts)
        return *(found.y, found.entropy)[: loss.results], gradients.x

    return jax.jit(run)


def cotangents(op, d):
    return (d, jnp.flip(d) - 0.3)[: LOSSES[op].results]


def check(op, x, labels, d, *, schedule=None, padding=0, positions=None, scales=None, **options):
    """Run both passes in the interpreter and assert that the results are within their bounds.

    `scales` has a scale for each row, or is None.
    """
    rows, classes = x.shape
    has = {"has_positions": positions is not None, "has_scale": scales is not None}
    spec = make_spec(op, rows, classes + padding, x.dtype, padding=padding, **has, **options)
    # The padding is filled with the dtype's largest number. It must not be added to any sum. Its
    # gradient must be 0, because later matmuls read it.
    wide = jnp.concatenate([x, jnp.full((rows, padding), jnp.finfo(x.dtype).max, x.dtype)], 1)
    d = cotangents(op, d)
    with mosaic.interpreted():
        *results, dx = both_passes(spec, schedule)(wide, labels, d, positions, scales)
    assert not dx[:, classes:].any()
    if positions is not None:
        assert not any(a[~positions].any() for a in (*results, dx))
    if scales is not None:
        options["logits_scale"] = np.where(positions, exact(scales), 1)[:, None]
    expected = LOSSES[op].reference(x, labels, positions=positions, dtype=x.dtype.name, **options)
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
    scales, positions = jnp.array([0.7, -1.5, jnp.nan, 3.0, 0.0]), jnp.arange(5) != 2
    check(op, *operands((5, cols), dtype), scales=scales, positions=positions, **options)


@of_labels
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
    of_nan = tuple(a.at[2].set(jnp.nan) for a in cotangents(op, d))
    with mosaic.interpreted():
        *results, dx = both_passes(spec)(x, labels, of_nan, positions)
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
    labels = labels.at[0].set(classes - 1).at[1].set(classes)
    check(op, x, labels, d, padding=padding, **options)


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
    with mosaic.interpreted():
        check_gradient_in_the_logits_place(spec, x, labels, cotangents(op, d))


def check_gradient_in_the_logits_place(spec, *given):
    results = [both_passes(spec, gradient_dtype=dtype)(*given) for dtype in (None, spec.x_dtype)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(exact(a), exact(b))
        assert not jnp.isnan(a).any()


@each_loss
def test_no_races(op):
    for cols, dtype, schedule in (
        (2048, "bfloat16", None),
        (1031, "float32", None),
        (2048, "float32", LossSchedule(1, warpgroups=2)),
    ):
        x, labels, d = operands((2, cols), dtype)
        given = x, x if op == KL else labels, cotangents(op, d)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            both_passes(make_spec(op, 2, cols, dtype), schedule)(*given)
        assert not interpret_pallas_call.get_races().races_found


def test_schedules():
    for dtype in (BF16, F32):
        for cols in (131, 1000, 32768, 50257, 128256, 262144):
            for rows in (1, 5, 66, 8192):
                schedule = choose(make_spec(CE, rows, cols, dtype), HOPPER)
                units = RowFragments.of(cols, 16 // dtype.itemsize)
                assert schedule.warpgroups * schedule.units <= max(units.count, 1)
    assert choose(make_spec(CE, 5, 128256, BF16), HOPPER) == LossSchedule(2, 4)


@each_loss
def test_what_the_kernels_refuse(op):
    refusals = {
        "128 columns": make_spec(op, 8, 127, BF16),
        "mask of classes": make_spec(op, 8, 1000, BF16, has_mask=True),
        "float64": make_spec(op, 8, 1000, np.float64),
        "size 0": make_spec(op, 0, 1000, BF16),
        "parts than": changed(make_spec(op, 2**26, 2**18, BF16), direction="bwd"),
    }
    for words, spec in refusals.items():
        assert words in mosaic.why_unsupported(spec)
    assert mosaic.why_unsupported(make_spec(op, 8, 1000, BF16)) is None
    for dtype in ("bfloat16", "float32"):
        function = LOSSES[op].function
        plan = jaxnorm.implementation_for(function, (8192, 50257), dtype, platform="cuda")
        assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")


# -------------------------------------------------------------- lowered, or compiled for an H100


def types_of(spec, label_dtype="int32"):
    """Return the types of the operands of `both_passes`."""
    shape = (spec.rows, spec.cols)
    other = (shape, spec.loss.teacher_dtype) if spec.op == KL else (shape[:1], label_dtype)
    positions = [(shape[:1], bool)] * spec.loss.has_positions
    x, other, d, *positions = (
        jax.ShapeDtypeStruct(*each)
        for each in [(shape, spec.x_dtype), other, (shape[:1], F32), *positions]
    )
    return x, other, (d,) * LOSSES[spec.op].results, *positions


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("op", "rows", "cols", "dtype", "other"),
    [
        (CE, 5, 128256, BF16, "int32"),
        (CE, 512, 50257, F32, "int8"),
        (CE, 512, 4096, F16, "uint64"),
        (CE, 5, 50257, F16, "uint8"),
        (CE, 512, 50257, BF16, "int64"),
        (LP, 5, 128256, BF16, "int32"),
        (LP, 512, 50257, F32, "uint8"),
        (LP, 512, 4096, F16, "int64"),
        (KL, 5, 128256, BF16, BF16),
        (KL, 512, 50257, F32, BF16),
        (KL, 512, 4096, F16, F16),
    ],
    ids=str,
)
def test_lowers(op, rows, cols, dtype, other):
    """Each pass is one kernel. `other` is the dtype of the labels, or of the teacher's logits."""
    with jax.enable_x64(True):
        options = {**LOSSES[op].options, "has_positions": True}
        for reverse in (False, True) if op == KL else (False,):
            options |= {"teacher_dtype": np.dtype(other), "reverse": reverse} if op == KL else {}
            spec = make_spec(op, rows, cols, dtype, **options)
            assert kernels_in(both_passes(spec), *types_of(spec, other)) == 2


# With 64 registers per thread, four blocks fit into an SM; with 80 or 96, at least two do. Kernels
# need more than 64 if labels are smoothed, if logits are capped, or if a third sum is computed.
# Those of a divergence need up to 128.
@pytest.mark.parametrize(
    ("op", "options", "registers"),
    [
        (CE, {}, (64, 96)),
        (CE, SMOOTHED, (96, 96)),
        (CE, {"logit_softcap": 30.0}, (80, 96)),
        (CE, CAPPED, (96, 96)),
        (LP, {}, (96, 96)),
        (LP, CAP, (96, 96)),
        (KL, {}, (128, 128)),
        (KL, {"reverse": True}, (128, 128)),
        (KL, CAPS, (128, 128)),
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
    parts = LossSchedule(2 if op == KL else 4)
    # The logits of a linear divergence are float32, and their gradient often has 16 bits.
    gradient_dtype = BF16 if op == KL else None
    program = both_passes(spec, parts=parts, gradient_dtype=gradient_dtype)
    backward, forward = compiler.compile(program, types_of(spec))
    assert (forward.spilled, backward.spilled) == (0, 0)
    assert forward.registers <= registers[0]
    assert backward.registers <= registers[1]


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

    def step(x, other, scales, *d):
        scaled = {"logits_scale": scales} if has_scales else {}
        results, vjp = jax.vjp(lambda x: function(x, other, **scaled), x)
        return results, *vjp(d if op == LP else d[0])

    logits, row = ((8, 512, 50257), dtype), (8, 512)
    shapes = [logits, logits if op == KL else (row, np.int32)]
    shapes += [(row, F32)] * (1 + LOSSES[op].results)
    arrays = [jax.ShapeDtypeStruct(s, t, sharding=compiler.sharding) for s, t in shapes]
    text = jax.jit(step).lower(*arrays).compile().as_text()
    made = hlo.made(text, 8 * 512 * 50257)
    assert made == (["custom-call"] if implementation is None else ["fusion"])


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("label_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(512, 50257), (2048, 128256), (300, 131)])
@of_labels
def test_gradient_in_the_logits_place_on_a_gpu(op, rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        x, labels, d = operands((rows, cols), dtype)
        given = x, labels.astype(label_dtype), cotangents(op, d)
        check_gradient_in_the_logits_place(make_spec(op, rows, cols, dtype), *given)
