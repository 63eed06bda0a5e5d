"""All functions of rows on meshes: values, gradients, shardings, and exchanged arrays.

The mesh has eight virtual CPU devices. A shard runs XLA's code or a stand-in for a kernel. XLA's
partitioner cannot split the stand-in, just as it cannot split a kernel. `test_set_mesh` tests all
functions inside `jax.set_mesh`. Linear layers and their losses are in `test_linear_meshes`.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from functions import FUNCTIONS, Sizes, floats_in, gradients, of_floats, operands_of, step_of
from jax.sharding import PartitionSpec as P
from meshes import (
    KINDS,
    Case,
    collectives,
    eight_devices,
    in_shards,
    mesh_of,
    on_mesh,
    which_kernels,  # noqa: F401
)
from pairs import pairwise
from program_error import analyse, assert_analysed, assert_computes
from stand_in import Kernels, as_default

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]
of_kinds = pytest.mark.parametrize("kind", ["auto", "explicit"])

MESH = {"data": 4, "model": 2}
SIZES = Sizes((8, 4), 64, 64)
ROWS = math.prod(SIZES.rows)


class Layout(NamedTuple):
    """The shardings of x, of parameters, and of rotary tables.

    If `tables` is None, the first axis of the tables is sharded like the first axis of x.
    """

    x: P
    params: P = P()
    tables: P | None = None


LAYOUTS = {
    "rows": Layout(P("data")),
    "both": Layout(P("data", "model")),
    "over two": Layout(P(("data", "model"))),
    "replicated": Layout(P()),
    "columns": Layout(P("data", None, "model")),
    "FSDP": Layout(P("data"), P("model")),
}
OF_TABLES = {
    "tables whole": Layout(P("data", "model"), tables=P()),
    "tables split": Layout(P("model"), tables=P("data")),
    "tables otherwise": Layout(P("model", "data"), tables=P("data")),
    "columns and pairs": Layout(P("data", None, "model"), tables=P("data", None, "model")),
}
# Other orders of mesh axes, for one function.
CROSSED = {
    "crossed": Layout(P("model", "data"), P("data")),
    "second axis": Layout(P(None, "model"), P(("model", "data"))),
    "columns over two": Layout(P(None, None, ("data", "model")), P("data")),
    "columns and rows": Layout(P("model", None, "data"), P(("data", "model"))),
}
NAMES = [
    name
    for name in FUNCTIONS
    if "linear" not in name and name not in ("layer_norm from input", "rms_norm_rope from input")
]
OF_GROUPS = "layer_norm of groups"
SCATTERED = (OF_GROUPS, "rms_norm_gated of heads")
# Functions that run no kernel on a mesh, or have a mask or bias that the stand-in does not support.
WITHOUT_KERNEL = {"softmax with a mask", "softmax with a bias"}
WITHOUT_KERNEL |= {*SCATTERED, "softmax_cross_entropy_with_integer_labels of classes"}
WITHOUT_KERNEL |= {"kl_divergence reverse"}


def specs_of(name, layout):
    a, b, c = (*layout.x, None, None, None)[:3]
    specs = {
        **dict.fromkeys(("x", "residual", "gate", "logits", "classes"), P(a, b, c)),
        **dict.fromkeys(("labels", "candidates", "counts"), P(a, b)),
        **dict.fromkeys(("scale", "bias", "branch"), layout.params),
        **dict.fromkeys(("of_samples", "mask"), P(a)),
        **dict.fromkeys(("cos", "sin"), P(a) if layout.tables is None else layout.tables),
        **dict.fromkeys(("of_groups", "of_heads"), P(b)),
        "logits_bias": P(None, b),
    }
    return [specs[kind] for kind in FUNCTIONS[name].kinds.split()]


@functools.cache
def on_one_device(name):
    return analyse(step_of(name), *operands_of(name, sizes=SIZES))


def in_layout(step, name, layout, kind):
    """Return the compiled step of a function on a mesh, and its operands."""
    operands, specs = operands_of(name, sizes=SIZES), specs_of(name, layout)
    return on_mesh(step, operands, specs, mesh_of(Case("", MESH, P()), kind), kind)


def sizes_of(compiled):
    """Return the number of elements of each array that a collective returns."""
    found = collectives(compiled).values()
    return [math.prod(int(n) for n in shape.split(",") if n) for v in found for shape in v]


# Each function runs in each layout, on each kind of mesh axis, and with XLA's code and with the
# stand-in for a kernel. Over all functions, each layout meets each kind and each of the two codes
# several times. If parameters or columns are sharded, each function also runs the stand-in on Auto
# axes: only there, the rule for XLA's partitioner and the code for parts of rows matter.
WAYS = [(kind, runs) for kind in KINDS for runs in ("xla", "kernel")]
CASES = [
    *(
        (name, layout, *way)
        for i, name in enumerate(NAMES)
        for j, layout in enumerate(LAYOUTS)
        for way in [WAYS[(i + j) % 6], *[("auto", "kernel")] * (layout in ("columns", "FSDP"))]
    ),
    *(
        (name, layout, kind, runs)
        for layout in OF_TABLES
        for name in ("rms_norm_rope", "rms_norm_rope of constant tables")
        for kind, runs in (("auto", "xla"), ("explicit", "kernel"))
    ),
    *(("layer_norm", layout, "explicit", "xla") for layout in CROSSED),
]


def is_its_own(name, layout, kind, runs):
    """Return True if the joined results of all shards differ from the result on one device.

    This is possible only for calls in `jax.shard_map`. For example, if the mesh splits an axis over
    which the call normalises, each shard is normalised by itself.
    """
    of_positions = name == OF_GROUPS and layout != "replicated"
    of_heads = "with a bias" in name and layout == "both"  # splits queries of a causal softmax
    return kind == "manual" and (layout == "columns" or of_positions or of_heads)


# In the functions of SCATTERED, rows with equal parameters are not consecutive. The stand-in does
# not support this, so these functions run XLA's code.
CASES = [
    (name, layout, "explicit" if is_its_own(name, layout, kind, runs) else kind, code)
    for name, layout, kind, runs in CASES
    for code in ["xla" if name in SCATTERED else runs]
]


@pytest.mark.parametrize(("name", "layout", "kind", "runs"), [*dict.fromkeys(CASES)])
def test_rows_on_a_mesh(name, layout, kind, runs):
    """Values are correct, kernels run on complete rows of a shard, and few arrays are exchanged.

    Devices exchange gradients of parameters. If columns are split, they also exchange sums over
    each row. x is exchanged only if it must be resharded to match a parameter.
    """
    expected, its = on_one_device(name), (LAYOUTS | OF_TABLES | CROSSED)[layout]
    with as_default(Kernels()) if runs == "kernel" else contextlib.nullcontext() as kernels:
        compiled, sharded = in_layout(step_of(name), name, its, kind)
        results = compiled(*sharded)
    assert_analysed(results, expected)
    x, is_split = sharded[0], its.x[-1:] == ("model",) and len(its.x) == 3
    # On Auto axes, XLA may reshard x to match parameters or tables.
    if kind != "auto" or layout in ("rows", "both", "over two", "replicated"):
        for a in jax.tree.leaves(results):
            if a.shape == x.shape:
                assert a.sharding.is_equivalent_to(x.sharding, x.ndim)
    if kind == "explicit":  # Each gradient is sharded like its operand.
        specs = [jax.typeof(sharded[i]).sharding.spec for i in floats_in(sharded)]
        assert [jax.typeof(a).sharding.spec for a in results[1]] == specs
    travels = sizes_of(compiled)
    params = [a.size for a in sharded[1:] if a.size < x.size]
    if layout in LAYOUTS and not (is_split and "rope" in name):
        # The exchanged arrays are gradients of parameters. If columns are split, partial sums of
        # each row are exchanged, too.
        assert max(travels, default=0) <= max(*params, 4 * ROWS, 0)
        assert not (travels and layout == "replicated")
    # On Auto axes, XLA may gather parameters that differ between samples. It may also gather rows
    # if XLA's code runs.
    of_samples = "of_samples" in FUNCTIONS[name].kinds
    moves_rows = name == OF_GROUPS or (kind == "auto" and (runs == "xla" or of_samples))
    if layout in ("rows", "both", "over two") and not moves_rows:
        assert {*collectives(compiled)} <= {"all-reduce"}
        assert sum(travels) <= sum(params)  # each gradient is exchanged once
    if kernels is not None:
        # If a layout splits x's columns, a device gathers complete heads (rows) before it runs a
        # kernel with a rotation.
        over = its.x[:2] if "rope" in name else its.x
        shards = math.prod(MESH[axis] for axis in jax.tree.leaves(tuple(over)))
        rows = (ROWS // shards, x.shape[-1])
        if name == "rms_norm_rope":  # no kernel runs, because tables have gradients
            assert {*kernels.shapes} <= {rows} or layout in OF_TABLES
        elif name in WITHOUT_KERNEL or (is_split and "rope" not in name):
            assert not kernels.shapes
        elif layout in LAYOUTS and not (kind == "auto" and layout == "FSDP"):
            # Usually, the forward and the backward each run a kernel. If only the sum h is used,
            # the forward computes just this sum, without a kernel. The backward still runs its
            # kernel, with zeros as the cotangent of y.
            assert kernels.shapes == [rows] * (1 if "h alone" in name else 2)


# Maps a name to a function that takes a function f and its operands, and returns a derivative.
DERIVATIVES = {
    "jvp": lambda f, *a: jax.jvp(f, a, tuple(map(jnp.cos, a)))[1],
    "forward over reverse": lambda f, *a: jax.jvp(
        gradients(f, tuple(range(len(a)))), a, tuple(map(jnp.cos, a))
    )[1],
    "transpose of linearize": lambda f, *a: jax.linear_transpose(jax.linearize(f, *a)[1], *a)(
        jax.tree.map(jnp.cos, f(*a))
    ),
}


def derivative_of(name, derivative):
    def run(*operands):
        floats = [operands[i] for i in floats_in(operands)]
        found = DERIVATIVES[derivative](of_floats(FUNCTIONS[name].ours, operands), *floats)
        return [], jax.tree.leaves(found)

    return run


@functools.cache
def derivative_on_one_device(name, derivative):
    return analyse(derivative_of(name, derivative), *operands_of(name, sizes=SIZES))


@pytest.mark.parametrize(
    ("name", "derivative", "layout", "kind"),
    pairwise(NAMES, [*DERIVATIVES], ["both", "columns", "FSDP"], ["auto", "explicit"]),
)
def test_forward_mode_on_a_mesh(name, derivative, layout, kind):
    step = derivative_of(name, derivative)
    compiled, sharded = in_layout(step, name, LAYOUTS[layout], kind)
    assert_analysed(compiled(*sharded), derivative_on_one_device(name, derivative))


WITH_TWO = [n for n in NAMES if {"residual", "gate"} & {*FUNCTIONS[n].kinds.split()}]


@pytest.mark.parametrize("name", WITH_TWO)
def test_a_second_operand_of_rows_that_lies_otherwise(name):
    """On Explicit axes, a second operand with another sharding is resharded like x.

    Its gradient is resharded back.
    """
    operands, specs = operands_of(name, sizes=SIZES), specs_of(name, LAYOUTS["rows"])
    specs[1] = P(None, "model")
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    results = jax.jit(step_of(name))(*in_shards(operands, mesh, specs))
    assert_analysed(results, on_one_device(name))
    values, (dx, dsecond, *_) = results
    found = [jax.typeof(a).sharding.spec[:2] for a in (*values, dx, dsecond)]
    assert found == [("data", None)] * (len(values) + 1) + [(None, "model")]


@pytest.mark.parametrize(
    "lead", [(8, 1), (), (4, 8, 1), (1, 1, 1), (4, 1, 2), (8, 2), (2,)], ids=str
)
def test_kernels_read_tables_as_they_are(lead):
    """Kernels read rotary tables without expanding them to the rows of x.

    `lead` has the sizes of the tables' axes before the columns. They broadcast to (4, 8, 2), the
    sizes of x's axes before the columns.
    """
    x, scale = (jnp.cos(jnp.arange(math.prod(s)) + 1.0).reshape(s) for s in ((4, 8, 2, 16), (16,)))
    angles = jnp.arange(math.prod(lead) * 8.0).reshape(*lead, 8)

    def step(x, scale):
        function = FUNCTIONS["rms_norm_rope"].ours
        y, pullback = jax.vjp(lambda *a: function(*a, jnp.cos(angles), jnp.sin(angles)), x, scale)
        return y, pullback(jnp.cos(y))

    expected = analyse(step, x, scale)
    with as_default(Kernels()) as kernels:
        assert_analysed(jax.jit(step)(x, scale), expected)
        assert kernels.tables == [(math.prod(lead), 8)] * 2


# ---------------------------------------------------------------- calls that the table has not

X, SCALE = operands_of("rms_norm", sizes=SIZES)


def over(x, spec, kind):
    """Shard an array over the mesh."""
    return in_shards([x], mesh_of(Case("", MESH, P()), kind), [spec])[0]


@of_kinds
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_other_axes(kernels, axis, kind):
    """A softmax or norm over axes that are not sharded exchanges nothing."""
    x = over(X, P(None, None, ("data", "model")), kind)
    for function in (jaxnorm.softmax, jaxnorm.layer_norm):
        of_axis = functools.partial(function, axis=axis)
        compiled = jax.jit(of_axis).lower(x).compile()
        assert not collectives(compiled)
        assert_computes(compiled(x), of_axis, X)


@of_kinds
def test_the_gradient_of_a_16_bit_softmax_over_sharded_columns(kind):
    """In 16 bits, the backward pass divides by the sum of y over the columns of all shards."""
    x = X.astype("bfloat16")

    def gradient(x):
        return jax.vjp(jaxnorm.softmax, x)[1](jnp.cos(x))[0]

    assert_computes(jax.jit(gradient)(over(x, P(None, None, "data"), kind)), gradient, x)


@pytest.mark.remat
@of_kinds
@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.checkpoint, functools.partial(jax.checkpoint, policy=jaxnorm.save_policy)],
    ids=["scan", "checkpoint", "save_policy"],
)
def test_training_through_scanned_layers(kernels, transform, kind):
    def gradient(x, scales, weights, transform=transform):
        def layer(x, parameters):
            scale, weight = parameters
            return x + jnp.tanh(jaxnorm.rms_norm(x, scale) @ weight), None

        def loss(*operands):
            x, *parameters = operands
            return jnp.sum(jax.lax.scan(transform(layer), x, parameters)[0] ** 2)

        return jax.grad(loss, (0, 1, 2))(x, scales, weights)

    parameters = jnp.stack([SCALE] * 3), 0.1 * jnp.sin(jnp.arange(3.0 * 64 * 64)).reshape(3, 64, 64)
    x, scales, weights = X, *parameters
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded = in_shards((x, scales, weights), mesh, [P("data", "model"), P(), P()])
    compiled = jax.jit(gradient).lower(*sharded).compile()
    assert {*collectives(compiled)} <= {"all-reduce"}
    plain = functools.partial(gradient, transform=lambda f: f)
    assert_computes(compiled(*sharded), plain, x, scales, weights)


@of_kinds
def test_vmap_of_a_sharded_call(kernels, kind):
    """Under `jax.vmap`, batch entries become rows. Each device runs one call on its shard."""
    sharded, function = over(X, P("data", "model"), kind), jax.vmap(jaxnorm.rms_norm, (0, None))
    compiled = jax.jit(function).lower(sharded, SCALE).compile()
    assert not collectives(compiled)
    assert_computes(compiled(sharded, SCALE), jaxnorm.rms_norm, X, SCALE)
    assert kernels is None or kernels.shapes == [(ROWS // 8, 64)]


def test_manual_axes_without_checks(kernels):
    """With check_vma=False, the caller sums parameters' gradients, as for any JAX function."""
    step, operands = step_of("layer_norm"), operands_of("layer_norm", sizes=SIZES)

    def local(*operands):
        y, (dx, *of_parameters) = step(*operands)
        return y, [dx, *(jax.lax.psum(g, "data") for g in of_parameters)]

    specs = P("data"), P(), P()
    mapped = jax.shard_map(
        local,
        mesh=mesh_of(Case("", MESH, P()), "manual"),
        in_specs=specs,
        out_specs=([P("data")], [*specs]),
        check_vma=False,
    )
    assert_analysed(jax.jit(mapped)(*operands), on_one_device("layer_norm"))


def test_some_axes_manual_and_others_not(kernels):
    """If only some mesh axes are manual, XLA's code runs.

    XLA partitions the call along the other mesh axes, and XLA cannot partition a kernel. If the
    user requests a kernel, an error is raised.
    """
    sharded = over(X, P("data", "model"), "auto")

    def mapped(**options):
        return jax.jit(
            jax.shard_map(
                functools.partial(jaxnorm.rms_norm, **options),
                mesh=sharded.sharding.mesh,
                in_specs=(P("data"), P()),
                out_specs=P("data"),
                axis_names={"data"},
            )
        )

    compiled = mapped().lower(sharded, SCALE).compile()
    assert max(sizes_of(compiled), default=0) < sharded.size // 8
    assert_computes(compiled(sharded, SCALE), jaxnorm.rms_norm, X, SCALE)
    if kernels is not None:
        message = "^rms_norm: implementation='stand_in' cannot run on .* neither all manual nor"
        with pytest.raises(ValueError, match=message):
            mapped(implementation="stand_in").lower(sharded, SCALE)


def test_shards_of_unequal_size(kernels):
    """If shards have unequal sizes, XLA's code runs, and a kernel raises an error.

    XLA pads such shards, and a kernel would treat the padding as rows.
    """
    spread = over(X, P("data"), "auto").sharding
    x = jnp.ones((10, 64))

    @jax.jit
    def run(x):
        return jaxnorm.softmax(jax.lax.with_sharding_constraint(x, spread))

    if kernels is None:
        assert_computes(run(x), jaxnorm.softmax, x)
        return
    with pytest.raises(Exception, match=r"\(10, 64\).*10 is no multiple of the 4 shards.*pad x"):
        run(x)


@pytest.mark.parametrize("kernels", ["kernel"], indirect=True)
def test_a_forced_kernel_never_gathers(kernels):
    forced = functools.partial(jaxnorm.softmax, implementation="stand_in")
    with pytest.raises(ValueError, match=r"^softmax: .* over an axis that is sharded.*leave"):
        forced(over(X, P(None, None, "data"), "explicit"))
    assert not collectives(jax.jit(forced).lower(over(X, P("data"), "auto")).compile())


def test_an_export_for_a_mesh_holds_no_kernel(kernels):
    x = over(X, P("data"), "auto")
    exported = jax.export.export(jax.jit(jaxnorm.softmax, in_shardings=x.sharding))(X)
    assert exported.nr_devices == 8
    restored = jax.export.deserialize(exported.serialize())
    assert_computes(jax.jit(restored.call)(x), jaxnorm.softmax, X)
    assert kernels is None or not kernels.shapes
