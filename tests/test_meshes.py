"""All functions of rows on meshes: values, gradients, shardings, and exchanged arrays.

The mesh has eight virtual CPU devices. A shard runs XLA's code or a stand-in for a kernel. XLA's
partitioner cannot split the stand-in, just as it cannot split a kernel. Linear layers and their
losses are in `test_linear_meshes`.
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
from meshes import KINDS, Case, collectives, eight_devices, in_shards, mesh_of
from pairs import pairwise
from program_error import analyse, assert_analysed
from stand_in import Kernels, as_default

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]

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
    "second axis over two": Layout(P(None, ("model", "data")), P(("model", "data"))),
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


def on_mesh(step, name, layout, kind):
    """Return the compiled step on a mesh, its operands, and the sharding that results must have."""
    operands, specs = operands_of(name, sizes=SIZES), specs_of(name, layout)
    mesh = mesh_of(Case("", MESH, P()), kind)
    if kind == "manual":
        # In `jax.shard_map`, each shard has whole parameters.
        specs = [P() if s == layout.params else s for s in specs]
        results, _ = jax.eval_shape(step, *operands)
        by_rank = {3: specs[0], 2: P(*specs[0][:2])}
        outs = [by_rank[a.ndim] for a in results], [specs[i] for i in floats_in(operands)]
        step = jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=outs)
    sharded = in_shards(operands, mesh, specs)
    return jax.jit(step).lower(*sharded).compile(), sharded


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
        compiled, sharded = on_mesh(step_of(name), name, its, kind)
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
    compiled, sharded = on_mesh(derivative_of(name, derivative), name, LAYOUTS[layout], kind)
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
