"""The kernels of log_prob_and_entropy: interpreted, lowered, and compiled for an H100."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forward_cases import BF16, F16, F32
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from log_prob_cases import LogProbs
from loss_cases import operands
from reference import assert_within, exact
from specs import build_spec, changed
from test_cross_entropy import PARTS, LossForwardSchedule, Parts, types

import jaxnorm
from benchmarks import contract, hlo
from jaxnorm_kernels import mosaic, xla

pytestmark = pytest.mark.usefixtures("quick_to_compile")

NAME = "log_prob_and_entropy"
CAPPED = {"logits_scale": 0.7, "logit_softcap": 8.0}


def make_spec(rows, cols, dtype, **options):
    options = {"want_stats": True, **options}
    return build_spec(NAME, "fwd", rows, cols, np.dtype(dtype), F32, **options)


@functools.lru_cache(maxsize=8)
def forward_and_backward(spec, schedule=None, parts=PARTS):
    """A function of logits, labels, both cotangents and, if there are any, positions."""
    backward = changed(spec, direction="bwd", want_stats=False)

    def both(x, labels, a, b, positions=None):
        call = functools.partial(contract.call, mosaic)
        y, entropy, stats = call(spec, x, labels, None, positions, schedule=schedule)
        (dx,) = call(backward, x, stats, labels, None, entropy, a, b, schedule=parts)
        return y, entropy, dx

    return jax.jit(both)


def both_cotangents(d):
    return d, jnp.flip(d) - 0.3


def check(x, labels, d, positions=None, *, schedule=None, padding=0, **options):
    """Both passes in the interpreter, within the bounds of the reference in float64."""
    rows, classes = x.shape
    has = {"has_positions": positions is not None}
    spec = make_spec(rows, classes + padding, x.dtype, padding=padding, **has, **options)
    # No padding may become a part of a sum.
    wide = jnp.concatenate([x, jnp.full((rows, padding), jnp.finfo(x.dtype).max)], 1)
    a, b = both_cotangents(d)
    arrays = [v for v in (wide, labels, a, b, positions) if v is not None]
    with mosaic.interpreted():
        y, entropy, dx = forward_and_backward(spec, schedule)(*arrays)
    assert not dx[:, classes:].any()
    expected = LogProbs(x, labels, positions=positions, dtype=x.dtype.name, **options)
    for ours, wanted, bound in zip((y, entropy), expected.results, expected.bounds):
        assert_within(ours, wanted, bound)
    assert not np.any(exact(entropy) < 0)
    assert_within(dx[:, :classes], expected.gradient(a, b), expected.gradient_bound(a, b))


# Whole units and steps; a rest of a step; rows that begin between multiples of 16 bytes; rows
# shorter than a unit of 16 bytes for each thread.
@pytest.mark.parametrize(
    ("cols", "dtype", "schedule", "options"),
    [
        (4096, "bfloat16", LossForwardSchedule(2), {}),
        (2056, "float16", LossForwardSchedule(1, warpgroups=2), {"logits_scale": 1.5}),
        (3001, "float32", LossForwardSchedule(2), {}),
        (5003, "bfloat16", LossForwardSchedule(1, warpgroups=2), CAPPED),
        (301, "float32", None, CAPPED),
        (516, "bfloat16", None, {}),
    ],
    ids=str,
)
def test_values(cols, dtype, schedule, options):
    """More rows than there are places where one may begin."""
    check(*operands((9 if cols % 2 else 2, cols), dtype), schedule=schedule, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_vocabulary(dtype):
    check(*operands((2, 50257), dtype))


def test_rows_of_all_kinds():
    """Bad labels, logits that are no numbers, and positions that do not count."""
    x, labels, d = operands((9, 515), "float32")
    labels = labels.at[0].set(-1).at[1].set(515).at[2].set(-100)
    x = x.at[2].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf)
    x = x.at[5, :-3].set(-jnp.inf).at[5, labels[5]].set(1).at[6].set(1e4).at[6, labels[6]].add(14)
    x = x.at[7].set(0).at[7, (labels[7] + 1) % 515].set(1e4).at[8].set(-jnp.inf)
    x = x.at[8, labels[8]].set(2)
    positions = jnp.arange(9) != 2
    spec = make_spec(9, 515, "float32", has_positions=True)
    with mosaic.interpreted():
        y, entropy, dx = forward_and_backward(spec)(
            x, labels, *(v.at[2].set(jnp.nan) for v in both_cotangents(d)), positions
        )
    for a in (y, entropy, dx.sum(-1)):
        assert np.isnan(a).tolist() == [True, True, False, True, True, *[False] * 4]
    assert (y[2], entropy[2], np.abs(dx[2]).max()) == (0, 0, 0)
    assert (y[8], entropy[8], entropy[7], np.abs(dx[8]).max()) == (0, 0, 0, 0)
    check(x[5:], labels[5:], 3 * d[5:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_classes_that_are_masked_by_the_lowest_number(dtype):
    """A mask of the lowest number may cover everything that a thread reads first, or at all."""
    x, labels, d = operands((3, 2056), dtype)
    lowest = jnp.finfo(dtype).min
    x = x.at[0, :2000].set(lowest).at[1, 1000:].set(lowest).at[2, 1:].set(lowest)
    check(x, labels.at[:2].set(jnp.array([2040, 3])), 3 * d, schedule=LossForwardSchedule(1))


@pytest.mark.parametrize(
    ("classes", "padding", "dtype", "options"),
    [
        (4089, 7, "bfloat16", {}),
        (301, 3, "float32", CAPPED),
        (1001, 30, "bfloat16", {}),
        (50257, 7, "float32", {}),
    ],
    ids=str,
)
def test_padding(classes, padding, dtype, options):
    """The last columns are no classes."""
    x, labels, d = operands((3, classes), dtype)
    check(x, labels.at[0].set(classes - 1), d, padding=padding, **options)


@pytest.mark.parametrize(("cols", "dtype"), [(5003, "bfloat16"), (131, "float32")])
def test_gradient_in_the_logits_place(cols, dtype):
    """Results have the same bits if dx overwrites x."""
    x, labels, d = operands((9, cols), dtype)
    spec = make_spec(9, cols, dtype)
    forward = jax.jit(functools.partial(contract.call, xla, spec))
    _, entropy, stats = forward(x, labels, None, None)
    results = []
    for overwrites in (False, True):
        backward = changed(spec, direction="bwd", want_stats=False, overwrites_x=overwrites)
        call = jax.jit(functools.partial(contract.call, mosaic, backward, schedule=PARTS))
        with mosaic.interpreted():
            (dx,) = call(x, stats, labels, None, entropy, *both_cotangents(d))
        results.append(np.asarray(dx).view(np.uint8))
    np.testing.assert_array_equal(*results)


def test_no_races():
    for cols, dtype in ((2048, "bfloat16"), (1031, "float32")):
        x, labels, d = operands((2, cols), dtype)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            forward_and_backward(make_spec(2, cols, dtype))(x, labels, *both_cotangents(d))
        assert not interpret_pallas_call.get_races().races_found


def test_which_calls_have_kernels():
    refusals = {
        "128 columns": make_spec(8, 127, BF16),
        "mask of classes": make_spec(8, 1000, BF16, has_mask=True),
        "float64": make_spec(8, 1000, np.float64),
    }
    for words, spec in refusals.items():
        assert words in mosaic.why_unsupported(spec)
    for dtype in ("bfloat16", "float32"):
        plan = jaxnorm.implementation_for(NAME, (8192, 50257), dtype, platform="cuda")
        assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")


# ------------------------------------------------------------------------ lowered and compiled


def arrays_of(rows, cols, dtype, label_dtype="int32"):
    x, labels, d, positions = types(rows, cols, dtype, label_dtype)
    return x, labels, d, d, positions


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "label_dtype"),
    [(5, 128256, BF16, "int32"), (512, 50257, F32, "uint8"), (512, 4096, F16, "int64")],
    ids=str,
)
def test_lowers(rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        spec = make_spec(rows, cols, dtype, has_positions=True, **CAPPED)
        traced = forward_and_backward(spec).trace(*arrays_of(rows, cols, dtype, label_dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("options", [{}, CAPPED], ids=str)
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [*itertools.product((1000, 50257, 128256), (BF16, F32)), (50257, F16)],
    ids=str,
)
def test_registers(cols, dtype, options, compiler):
    """A third sum takes so many registers that a block shares an SM with at least one other."""
    spec = make_spec(8192, cols, dtype, has_positions=bool(options), **options)
    arrays = arrays_of(8192, cols, dtype)
    backward, forward = compiler.compile(
        forward_and_backward(spec, parts=Parts(4)), arrays if options else arrays[:4]
    )
    assert (forward.spilled, backward.spilled) == (0, 0)
    assert forward.registers <= 96
    assert backward.registers <= 96


@pytest.mark.compiles
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_nothing_else_of_the_logits_size(dtype, implementation, compiler):
    """Results and gradient on a GPU: no array is made but the gradient."""

    def step(x, labels, a, b):
        function = functools.partial(jaxnorm.log_prob_and_entropy, implementation=implementation)
        results, vjp = jax.vjp(lambda x: function(x, labels), x)
        return results, *vjp((a, b))

    shapes = [((8, 512, 50257), dtype), ((8, 512), np.int32), *[((8, 512), F32)] * 2]
    arrays = [jax.ShapeDtypeStruct(s, t, sharding=compiler.sharding) for s, t in shapes]
    text = jax.jit(step).lower(*arrays).compile().as_text()
    made = hlo.made(text, 8 * 512 * 50257)
    assert made == (["custom-call"] if implementation is None else ["fusion"])


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(512, 50257), (2048, 128256), (300, 131)])
def test_gradient_in_the_logits_place_on_a_gpu(rows, cols, dtype):
    x, labels, d = operands((rows, cols), dtype)
    results = []
    for overwrites in (False, True):
        spec = make_spec(rows, cols, dtype)
        backward = changed(spec, direction="bwd", want_stats=False, overwrites_x=overwrites)

        @jax.jit
        def step(x, labels, a, b, spec=spec, backward=backward):
            y, entropy, stats = contract.call(mosaic, spec, x, labels, None, None)
            return (
                y,
                entropy,
                *contract.call(mosaic, backward, x, stats, labels, None, entropy, a, b),
            )

        results.append(step(x, labels, *both_cotangents(d)))
    for a, b in zip(*results, strict=True):
        assert jnp.array_equal(a, b)
        assert not jnp.isnan(a).any()
