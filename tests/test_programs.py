"""Every function with and without jit, in scans, exported, and lowered for other platforms.

The operands and plain JAX's formulas are those of the table in `functions`.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from functions import (
    BASIC,
    FUNCTIONS,
    SHAPES,
    Sizes,
    floats_in,
    gradients,
    operands_of,
    options_of,
    scalar,
)
from jax.experimental import checkify
from program_error import assert_computes
from programs import text_for_cuda

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each = pytest.mark.parametrize("name", FUNCTIONS)
basic = pytest.mark.parametrize("name", BASIC)


def both(function, wrt):
    """Return a function that computes two things: the results of `function`, and gradients.

    The gradients are those of `scalar(function)`.
    """
    return lambda *operands: (function(*operands), gradients(function, wrt)(*operands))


@each
def test_it_is_the_formula(name, x64):
    """Values and gradients are those of plain JAX's formula, in float64."""
    operands = operands_of(name, "float64")
    ours, plain = (both(f, floats_in(operands)) for f in FUNCTIONS[name][:2])
    results = jax.jit(ours)(*operands)
    assert {a.dtype for a in jax.tree.leaves(results)} == {np.dtype("float64")}
    assert_computes(results, plain, *operands, like=ours)


@each
def test_outside_jit(name):
    """Results outside of `jax.jit` are bitwise equal to those inside, even for NumPy arrays."""
    operands = operands_of(name)
    function, plain, _ = FUNCTIONS[name]
    values = jax.tree.leaves(function(*operands))
    for run, given in ((jax.jit(function), operands), (function, map(np.asarray, operands))):
        found = jax.tree.leaves(run(*given))
        if "linear" in name:  # `jax.jit` fuses several primitives, so results may differ slightly.
            assert_computes(found, function, *operands)
            continue
        for a, b in zip(found, values, strict=True):
            np.testing.assert_array_equal(a, b)
    ours, theirs = (gradients(f, floats_in(operands)) for f in (function, plain))
    assert_computes(ours(*operands), theirs, *operands, like=ours)
    run = both(function, floats_in(operands))
    with jax.disable_jit():
        uncompiled = run(*operands)
    assert_computes(uncompiled, run, *operands)


@each
@pytest.mark.parametrize("rows", [(0, 2), (3, 0)], ids=str)
def test_no_rows(name, rows):
    """If x has no rows, results have the expected shapes and dtypes, and all gradients are 0."""
    operands = operands_of(name, sizes=Sizes(rows))
    run = both(FUNCTIONS[name].ours, floats_in(operands))
    results, found = run(*operands)
    for a, b in zip(*map(jax.tree.leaves, (results, jax.eval_shape(run, *operands)[0]))):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for gradient, i in zip(found, floats_in(operands), strict=True):
        assert gradient.shape == operands[i].shape
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "log_softmax", "layer_norm", "rms_norm", "layer_norm from input"),
        *("layer_norm silu", "rms_norm_rope", "rms_norm_gated"),
    ],
)
def test_same_bits_with_and_without_a_gradient(name, dtype, implementation):
    """A requested implementation returns the same bits with and without a gradient.

    If no implementation is requested, the default may be different with and without a gradient.
    """
    x, *others = operands_of(name, "float32", Sizes((70,), 16))
    function = functools.partial(FUNCTIONS[name].ours, implementation=implementation)
    x = x.astype(dtype)
    y, _ = jax.jit(lambda x, *others: jax.vjp(lambda x: function(x, *others), x))(x, *others)
    np.testing.assert_array_equal(y, jax.jit(function)(x, *others))


# ------------------------------------------------------------------------ exports, other platforms


@pytest.mark.parametrize(
    ("name", "platforms"),
    [*((name, ("cpu", "cuda", "tpu")) for name in FUNCTIONS), *((name, None) for name in BASIC)],
)
def test_export_round_trip(name, platforms):
    operands = operands_of(name)
    run = both(FUNCTIONS[name].ours, floats_in(operands))
    exported = jax.export.export(jax.jit(run), platforms=platforms)(*operands)
    restored = jax.export.deserialize(exported.serialize())
    assert_computes(restored.call(*operands), run, *operands)


def of_symbols(name, operands):
    """Return the operands' types, with symbolic sizes for the axes of rows."""
    rows, sizes = jax.export.symbolic_shape("rows, heads"), Sizes()
    return [
        jax.ShapeDtypeStruct(
            (*rows, *a.shape[2:]) if SHAPES[kind](sizes)[:2] == sizes.rows else a.shape, a.dtype
        )
        for kind, a in zip(FUNCTIONS[name].kinds.split(), operands)
    ]


LINEAR_LOSSES = [name for name in FUNCTIONS if name.startswith("linear_")]
# Functions with operands that have an axis for positions, samples or groups. These axes cannot have
# a symbolic size in this test.
OF_POSITIONS = {"softmax with a mask", "softmax with a bias", "layer_norm of groups"}
OF_POSITIONS |= {"rms_norm_gated of heads"}
OF_POSITIONS |= {n for n, f in FUNCTIONS.items() if {"cos", "of_samples"} & {*f.kinds.split()}}


OF_ROWS = [n for n in FUNCTIONS if n not in {*LINEAR_LOSSES, *OF_POSITIONS}]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in OF_ROWS),
        # In bfloat16, `analyse` finds no finite bound for rms_norm_linear of a sum.
        *((name, "bfloat16") for name in OF_ROWS if name != "rms_norm_linear silu"),
    ],
)
def test_export_with_symbolic_rows(name, dtype):
    """An exported program with symbolic rows runs XLA's code for any number of rows.

    This holds for the forward and the backward. They run no kernels, because a kernel needs a known
    number of rows.
    """
    operands, function = operands_of(name, dtype), FUNCTIONS[name].ours
    if "implementation" in options_of(name.split()[0]):
        function = functools.partial(function, implementation="xla")
    run = both(function, floats_in(operands))
    exported = jax.export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(
        *of_symbols(name, operands)
    )
    for rows in ((4, 2), (3, 1)):
        given = operands_of(name, dtype, Sizes(rows))
        assert_computes(exported.call(*given), run, *given)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


def labels(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 12


SCALED_LOSS = functools.partial(
    jaxnorm.softmax_cross_entropy_with_integer_labels, label_smoothing=0.1, z_loss=0.1
)
PARAMETERS = {"B, N, 16": normal(2, 3, 16), "B, 2, 16": normal(2, 2, 16)}
LOGITS, OF_AXIS_1 = {"M, 2, C": normal(5, 2, 12)}, {"M, C, 2": normal(5, 12, 2)}
LABELS = {"M, 2, K": labels(5, 2, 3)}
# Each entry: a function, a dict from the symbolic shape of each operand to an operand, and the
# indices of the differentiated operands.
SYMBOLIC = {
    # A norm with parameters for each sample, as in adaLN; a norm with a gate for each sample; and
    # GroupNorm, which normalises over positions and columns.
    "samples": (
        lambda x, s: jaxnorm.layer_norm(x, s[:, :1], s[:, 1:2], scale_offset=1.0),
        PARAMETERS,
        (0, 1),
    ),
    "gate": (lambda x, s: jaxnorm.add_layer_norm(x, x, gate=s[:, :1])[0], PARAMETERS, (0, 1)),
    "groups": (
        lambda x, s: jaxnorm.layer_norm(x.reshape(*x.shape[:2], 4, 4), axis=(1, 3)),
        PARAMETERS,
        (0, 1),
    ),
    # The smoothed target of a class is a symbolic expression.
    "classes": (SCALED_LOSS, {"M, C": normal(3, 12), "M": labels(3)}, (0,)),
    "several labels": (jaxnorm.log_prob_and_entropy, LOGITS | LABELS, (0,)),
    "several labels over axis 1": (
        lambda x, labels: jaxnorm.log_prob_and_entropy(x, labels, 1),
        OF_AXIS_1 | LABELS,
        (0,),
    ),
    "12 classes": (jaxnorm.log_prob_and_entropy, {"M, 2, 12": normal(5, 2, 12)} | LABELS, (0,)),
    "labels of linear logits": (
        functools.partial(jaxnorm.linear_log_prob_and_entropy, chunk=3),
        {"5, 8": normal(5, 8), "8, 12": normal(8, 12), "5, K": labels(5, 3)},
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_other_symbolic_sizes(name):
    """Samples, positions, classes and labels may have symbolic sizes."""
    function, operands, wrt = SYMBOLIC[name]
    scope = jax.export.SymbolicScope()
    types = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), a.dtype)
        for shape, a in operands.items()
    ]
    run, given = both(function, wrt), [*operands.values()]
    assert_computes(jax.export.export(jax.jit(run))(*types).call(*given), run, *given)


@pytest.mark.parametrize("name", LINEAR_LOSSES)
def test_symbolic_rows_of_linear_losses_are_refused(name):
    types = of_symbols(name, operands_of(name))
    with pytest.raises(ValueError, match=r"expected sizes that are numbers.*for each size"):
        jax.export.export(jax.jit(FUNCTIONS[name].ours))(*types)


@basic
def test_lowering_for_a_gpu_from_any_host(name):
    operands = operands_of(name, "float32", Sizes((32, 2), 16))
    for run in (FUNCTIONS[name].ours, gradients(FUNCTIONS[name].ours, floats_in(operands))):
        assert "func.func public @main" in text_for_cuda(run, *operands)


@basic
def test_work_placed_on_the_cpu(name):
    """If arrays are on a CPU, XLA's code runs there, even if the default backend is a GPU."""
    cpu = jax.devices("cpu")[0]
    operands = [jax.device_put(a, cpu) for a in operands_of(name)]
    results = jax.jit(FUNCTIONS[name].ours)(*operands)
    assert {device for a in jax.tree.leaves(results) for device in a.devices()} == {cpu}
    assert_computes(results, FUNCTIONS[name].ours, *operands)


# ---------------------------------------------------------------------------------- checks for NaN


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "rms_norm", "layer_norm"])
def test_checkify_reports_a_nan_that_a_call_makes(name):
    function = getattr(jaxnorm, name)
    checked = checkify.checkify(jax.jit(function), errors=checkify.float_checks)
    error, _ = checked(jnp.asarray([[jnp.inf, 1.0], [1.0, 2.0]]))
    assert f"nan generated by primitive: jaxnorm.{name}" in error.get()
    assert checked(jnp.ones((2, 2)))[0].get() is None


@pytest.mark.parametrize("name", [*LINEAR_LOSSES, "rms_norm_linear"])
def test_checkify_names_the_call_that_got_a_nan(name):
    x, *others = operands_of(name)
    checked = checkify.checkify(jax.jit(FUNCTIONS[name].ours), errors=checkify.float_checks)
    error, _ = checked(x.at[0].set(jnp.nan), *others)
    expected = "jaxnorm.rms_norm" if name == "rms_norm_linear" else name.split()[0]
    assert expected in error.get()


@each
def test_checkify_inside_and_outside_of_a_gradient(name):
    """The function in a gradient may be checked, and so may the gradient."""
    operands = operands_of(name)
    wrt = floats_in(operands)
    function = jax.jit(scalar(FUNCTIONS[name].ours))
    check = functools.partial(checkify.checkify, errors=checkify.float_checks)
    inside, _ = jax.eval_shape(
        jax.grad(lambda *a: check(function)(*a)[::-1], wrt, has_aux=True), *operands
    )
    _, outside = jax.eval_shape(check(jax.grad(function, wrt)), *operands)
    assert inside == outside == jax.eval_shape(jax.grad(function, wrt), *operands)
