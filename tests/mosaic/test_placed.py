"""Softmax kernels with a mask, a bias or `causal`: values in the interpreter, and lowering."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_logits
from jax.sharding import PartitionSpec as P
from logits_cases import KINDS, SCALE, Case, mixed, of_width, op_of, operand_types
from program_error import assert_computes
from programs import text_for_cuda
from reference import SAFETY, assert_within, rounding
from specs import BF16, F32
from test_softmax import FUNCTIONS, data

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.schedules.forward import choose
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule


def interpret(call, *arrays):
    with mosaic.interpreted():
        return jax.jit(call.kernel("mosaic"))(*arrays)


def interpreted(op):
    """Return softmax or log_softmax with its kernels running in the interpreter.

    Like the public function, it can be differentiated.
    """

    def function(x, *, where=None, scale=1.0, bias=None, causal=False, dtype=None, **others):
        shapes = [None if a is None else a.shape for a in (where, bias)]
        case = Case(x.shape, *shapes, causal, scale)
        dtypes = x.dtype, None if bias is None else bias.dtype, dtype
        mask = [] if where is None else [jnp.expand_dims(where, [*range(x.ndim - where.ndim)])]

        @jax.custom_vjp
        def run(x, *bias):
            bias = [jnp.expand_dims(b, [*range(x.ndim - b.ndim)]) for b in bias]
            return interpret(case.call(op, *dtypes), x, *mask, *bias)[0]

        def backward(kept, dy):
            y, *shapes = kept
            dx, *dbias = interpret(case.backward(op, *dtypes), y, *mask, dy)
            return dx, *(d.reshape(b.shape) for d, b in zip(dbias, shapes))

        run.defvjp(lambda *primals: (y := run(*primals), (y, *primals[1:])), backward)
        return run(*[a for a in (x, bias) if a is not None])

    return function


# The cases cover each kind of tile, and each way to broadcast a mask or a bias. Either all rows of
# a tile share one row of the mask, or each row of x has its own. The mask has all columns of x, or
# a single column. In some cases, the number of rows is not a multiple of the rows per tile.
VALUES = [
    Case((2, 2, 8, 72), mask=(2, 1, 1, 72), bias=(2, 8, 72)),
    Case((2, 2, 16, 72), mask=(16, 1), bias=(2, 1, 1, 72), causal=True),
    Case((4, 2, 8, 72), bias=(4, 1, 1, 1), causal=True),
    Case((9, 3, 5, 72), mask=(3, 1, 72), bias=(5, 1)),
    Case((3, 3, 600), mask=(3, 600), bias=(3, 1, 600), causal=True),
    Case((1, 16, 600), bias=(16, 600), causal=True),
    Case((2, 3, 2500), mask=(2, 1, 1), bias=(3, 2500), causal=True),
    Case((2, 2, 3000), mask=(2, 2, 3000)),
    Case((2, 2, 9000), mask=(2, 9000), bias=(2, 1, 9000), causal=True),
]


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values(case, name, monkeypatch):
    # Successive cases have different combinations of dtypes, so that each function runs with most
    # combinations.
    mixes = test_logits.MIXES
    x_dtype, bias_dtype, y_dtype = mixes[
        (2 * VALUES.index(case) + (name == "softmax")) % len(mixes)
    ]
    monkeypatch.setitem(FUNCTIONS, name, interpreted(name))
    x, d = data(case.shape, x_dtype), data(case.shape, y_dtype, seed=1, scale=1.0)
    bias = data(case.bias or (), bias_dtype, seed=2)
    where = None if case.mask is None else test_logits.mask_of(case.mask)
    given = {"where": where, "bias": bias, "causal": case.causal, "scale": test_logits.SCALE}
    test_logits.check(name, x, d, **given)


EDGES = [
    Case((64, 1, 72), mask=(64, 1, 72), scale=1.0),
    Case((2, 600), mask=(2, 600), scale=1.0),
    Case((2, 5000), mask=(2, 5000), scale=1.0, bias=(5000,)),
    Case((64, 72), causal=True, mask=(64, 72), scale=1.0),
]
each_edge = pytest.mark.parametrize("case", EDGES, ids=str)


def kept_of(case, mask):
    """Return True for the elements that neither `mask` nor the causal mask masks."""
    causal = jnp.tril(jnp.ones((case.shape[0], case.shape[-1]), bool)) if case.causal else True
    return mask & causal


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("op", FUNCTIONS)
@each_edge
def test_what_takes_no_part_does_not_matter(case, op):
    """Masked elements have no effect, even if they are NaN.

    This also holds if all unmasked elements of the row are -inf.
    """
    mask = test_logits.mask_of(case.mask).at[0].set(False)
    kept = kept_of(case, mask)
    x = data(case.shape, "float32").at[1, ..., 1:].set(-jnp.inf).at[1, ..., 0].set(jnp.inf)
    if case.shape[0] > 5:
        x = x.at[3].set(-jnp.inf).at[4, ..., 1].set(jnp.nan).at[5, ..., :3].set(-jnp.inf)
    d = data(case.shape, "float32", seed=1)
    bias = [jnp.zeros(case.call(op, F32).view.logits_bias)] * (case.bias is not None)
    forward, backward = case.call(op, F32), case.backward(op, F32)
    # The kernel's x has NaN in masked entries, which it must not use. XLA's x has 0 there.
    operands = jnp.where(kept, x, 0), mask, *bias
    (y,) = interpret(forward, jnp.where(kept, x, jnp.nan), mask, *bias)
    assert_computes(y, lambda *a: forward.xla(*a)[0], *operands)
    (expected,) = forward.xla(*operands)
    got = interpret(backward, expected, mask, jnp.where(kept, d, jnp.inf))
    assert_computes(got, backward.xla, expected, mask, jnp.where(kept, d, 0))


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("op", FUNCTIONS)
@each_edge
def test_nan_of_what_takes_part_stays_there(case, op):
    """A NaN cotangent affects only its row, and masked entries of that row stay 0."""
    mask = test_logits.mask_of(case.mask).at[..., 0].set(True)
    d = data(case.shape, "float32", seed=1)
    forward, backward = case.call(op, F32), case.backward(op, F32)
    bias = [jnp.zeros(forward.view.logits_bias)] * (case.bias is not None)
    (y,) = forward.xla(data(case.shape, "float32"), mask, *bias)
    broken, clean = (
        interpret(backward, y, mask, cotangent) for cotangent in (d.at[1, ..., 0].set(jnp.nan), d)
    )
    dx = np.asarray(broken[0])
    np.testing.assert_array_equal(dx[~kept_of(case, mask)], 0)
    assert np.isnan(dx[1, ..., 0]).all()
    np.testing.assert_array_equal(np.delete(dx, 1, 0), np.delete(clean[0], 1, 0))
    for dbias in broken[1:]:
        np.testing.assert_array_equal(np.isnan(dbias).ravel(), np.isnan(dx[1]).ravel())


FILL = float(np.finfo(np.float32).min)


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(
    "case",
    [
        Case((64, 1, 72), mask=(64, 1, 72), scale=1.0, masked_logit=FILL),
        Case((4, 600), mask=(4, 600), scale=1.0, bias=(4, 600), masked_logit=FILL),
        Case((4, 5000), mask=(5000,), scale=1.0, bias=(1, 5000), masked_logit=FILL),
    ],
    ids=str,
)
def test_what_is_masked_may_take_part(case):
    """With a finite `masked_logit`, as in Flax, a fully masked row gives equal probabilities.

    The gradient of such a row is 0.
    """
    mask = test_logits.mask_of(case.mask)
    mask = mask.at[0].set(False) if mask.ndim > 1 else mask
    x = data(case.shape, "float32").at[1].set(FILL)  # the value of masked logits
    d = data(case.shape, "float32", seed=1)
    bias = [data(case.call("softmax", F32).view.logits_bias, "float32")] if case.bias else []
    forward, backward = case.call("softmax", F32), case.backward("softmax", F32)
    mask = mask.reshape(forward.view.mask)
    (expected,) = forward.xla(x, mask, *bias)
    (y,) = interpret(forward, x, mask, *bias)
    # All logits of this row are huge, so float32 rounding loses the bias that is added to them. The
    # bound of `assert_computes` does not cover this. So the row is compared with the uniform
    # distribution.
    even = np.full(case.shape[-1], 1 / case.shape[-1])
    assert_within(y[1], np.broadcast_to(even, y[1].shape), SAFETY * rounding(even, "float32"))
    rows = np.arange(len(y)) != 1
    assert_computes(y[rows], lambda *a: forward.xla(*a)[0][rows], x, mask, *bias)
    got = interpret(backward, expected, mask, d)
    assert_computes(got, backward.xla, expected, mask, d)


def test_the_gradient_of_one_value_for_a_row_is_refused_beside_masked_logits():
    case = Case((4, 600), mask=(4, 600), bias=(4, 1), masked_logit=FILL)
    assert mosaic.why_unsupported(case.call("softmax", F32).as_seen_by("mosaic")) is None
    assert "replaced by a number" in str(
        mosaic.why_unsupported(case.backward("softmax", F32).as_seen_by("mosaic"))
    )


# --------------------------------------------------------------------------------------- lowering


def assert_lowers(*calls):
    for call in calls:
        assert mosaic.why_unsupported(call.as_seen_by("mosaic")) is None
        assert mosaic.why_not_default(call.as_seen_by("mosaic")) is None
        assert "mosaic_gpu" in text_for_cuda(call.kernel("mosaic"), *operand_types(call))


@pytest.mark.parametrize(("kind", "cols", "dtypes"), [*mixed()])
def test_default_schedules_lower(kind, cols, dtypes):
    op, case = op_of(kind, cols), of_width(kind, 512, cols)
    assert_lowers(case.call(op, *dtypes), case.backward(op, *dtypes))


@pytest.mark.parametrize("queries", [6, 197])
@pytest.mark.parametrize("cols", [49, 197, 512, 1000, 2048])
def test_runs_of_any_length_lower(cols, queries):
    """The rows of a tile belong to one matrix, of which each has any number of rows."""
    shape = (24, 4, queries, cols)
    for case, run in (
        (Case(shape, causal=True), queries),
        (Case(shape, bias=(4, queries, cols), mask=(24, 1, 1, 1)), 4 * queries),
    ):
        forward, backward = case.call("softmax", BF16), case.backward("log_softmax", BF16)
        assert_lowers(forward, backward)
        assert run % choose(forward.as_seen_by("mosaic")).rows == 0
        assert run % softmax_schedule(backward.as_seen_by("mosaic")).rows == 0


MESH = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDED = {"mesh": MESH, "in_specs": (P("rows"), P(), P("rows")), "out_specs": (P("rows"), P())}


@pytest.mark.parametrize(
    ("transform", "in_axes"),
    [
        *(("vmap", axes) for axes in [(0, None, None), (0, 0, 0), (0, None, 0), (0, 0, None)]),
        *(("64-bit types", ()), ("shard_map", ())),
    ],
)
def test_transformations_lower(transform, in_axes):
    """A transformed call and its gradients run two kernels.

    In `shard_map`, the gradient of a bias that all shards share is summed over the shards.
    """

    def loss(x, bias, where):
        options = {"causal": True, "scale": SCALE, "implementation": "mosaic"}
        return jnp.sum(jnp.sin(jaxnorm.softmax(x, where=where, bias=bias, **options)))

    with jax.enable_x64(transform == "64-bit types"):
        x, bias = data((4, 64, 256), "float32"), data((1, 1, 256), "float32")
        arrays = [x, bias, jnp.ones((4, 1, 1), bool)]
        function = jax.value_and_grad(loss, argnums=(0, 1))
        if transform == "vmap":
            arrays = [a if n is None else jnp.stack([a] * 3) for a, n in zip(arrays, in_axes)]
            function = jax.vmap(function, in_axes)
        elif transform == "shard_map":
            function = jax.shard_map(jax.grad(loss, argnums=(0, 1)), **SHARDED)
        text = text_for_cuda(function, *arrays)
    assert text.count("mosaic_gpu_v2") == 2
    assert ("all_reduce" in text) == (transform == "shard_map")


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["mask", "bias", "causal"])
def test_a_program_holds_two_kernels_and_nothing_else(kind, compiler):
    """A softmax with a mask, a bias or `causal` is one kernel per pass, and nothing else.

    The backward kernel also computes the bias's gradient.
    """
    case = KINDS[kind]

    def typed(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=compiler.sharding)

    def run(x, mask, bias, d):
        def softmax(x, bias):
            return jaxnorm.softmax(
                x, -1, mask, bias=bias, causal=case.causal, implementation="mosaic"
            )

        y, vjp = jax.vjp(softmax, x, bias)
        return y, vjp(d)

    x = typed(case.shape, BF16)
    mask = None if case.mask is None else typed(case.mask, bool)
    bias = None if case.bias is None else typed(case.bias, BF16)
    text = jax.jit(run).lower(x, mask, bias, x).compile().as_text()
    ops = re.findall(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", text[text.index("ENTRY") :])
    free = {"parameter", "bitcast", "get-tuple-element", "tuple"}
    assert [op for op in ops if op not in free] == ["custom-call"] * 2
