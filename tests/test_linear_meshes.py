"""Tests of linear layers and of their losses on meshes.

The tests shard the rows, or either axis of the weight, or both (as FSDP does). The mesh has eight
virtual CPU devices. Arrays are float64, except for losses in chunks. The name of a layout lists the
split axes by these letters:

- n: the features of a result;
- f: the hidden features of an MLP;
- d: the features of x;
- V: the classes.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import layer_of_a_teacher, scales_of
from hlo import _computations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from log_prob_cases import mixed
from meshes import KINDS, Case, collectives, eight_devices, in_shards, mesh_of
from pairs import each_pair
from program_error import analyse, assert_analysed, assert_computes
from programs import kernels_in
from stand_in import Kernels, as_default

import jaxnorm
from jaxnorm import rms_norm_linear

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]

MESH = {"data": 4, "model": 2}
D, F, V = 16, 32, 64


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# --------------------------------------------------------------------------------- functions


def gated_loss(gate, up, weight, bias, *, out_sharding=None):
    given = {"bias": bias, "out_sharding": out_sharding}
    y = jaxnorm.gated_linear(gate, up, weight, **given)
    z = jaxnorm.activation_linear(gate, weight, **given)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z))


def norm_loss(x, residual, weight, scale, bias, **options):
    given = {"bias": bias, "residual": residual, "activation": "gelu"}
    y, h = rms_norm_linear(x, weight, scale, **given, **options)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(h))


LABELS = np.random.default_rng(4).integers(0, V, (8, 12)).astype(np.int32)
LABELS[0] = -100


def loss_of_rows(x, weight, bias, labels, *, reduction):
    """Call a loss that computes logits ``x @ weight`` itself, and reduce its results to one number.

    `reduction` determines which function is called. "divergence" calls `linear_kl_divergence`,
    "log_prob" calls `linear_log_prob_and_entropy`, "several" calls it with several labels per
    position, and "classes" with a mask of classes. For any other value, such as
    "mean", `linear_softmax_cross_entropy` is called, with the value as its option `reduction`.
    """
    options = {"bias": bias, "chunk": 4, "logit_softcap": 8.0}
    weights = jnp.where(labels >= 0, labels % 4 - 0.5, 0.0)
    log_prob = functools.partial(jaxnorm.linear_log_prob_and_entropy, x, weight, **options)
    match reduction:
        case "divergence":
            options |= {"where": weights, "logits_scale": scales_of(labels), "reduction": "none"}
            teacher = layer_of_a_teacher(labels, weight)
            results = jaxnorm.linear_kl_divergence(x, weight, *teacher, **options)
        case "several":
            several = jnp.stack([jnp.maximum(labels, 0), (labels + 5) % V], -1)
            results = log_prob(several, where=weights)
        case "classes":
            results = log_prob(labels, where=jnp.arange(V)[None, None] % 5 != 2)
        case "log_prob":
            results = mixed(*log_prob(labels, where=labels >= 0))
        case _:
            options |= {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2}
            loss = jaxnorm.linear_softmax_cross_entropy
            results = loss(x, weight, labels, where=weights, **options)
    return sum(jnp.sum(jnp.sin(result)) for result in jax.tree.leaves(results))


class Layer(NamedTuple):
    """A layer on a mesh.

    Attributes:
      loss: a function of the operands that returns one number.
      arrays: a function without arguments that returns the operands.
      specs: a function that takes the shardings of x and of the weight, and returns a list of the
        shardings of all operands.
    """

    loss: Callable[..., Any]
    arrays: Callable[[], tuple[Any, ...]]
    specs: Callable[[P, P], list[P]]
    dtype: str = "float64"


LAYERS = {
    "gated_linear": Layer(
        gated_loss,
        lambda: (normal(0, 8, 6, D), normal(1, 8, 6, D), normal(2, D, F) / 4, normal(3, F)),
        lambda x, w: [x, x, w, P(*w[1:2])],
    ),
    "rms_norm_linear": Layer(
        norm_loss,
        lambda: (
            *(normal(0, 8, 6, D), normal(1, 8, 6, D), normal(2, D, F) / 4),
            *(1 + normal(3, D) / 4, normal(4, F)),
        ),
        lambda x, w: [x, x, w, P(*w[:1]), P(*w[1:2])],
    ),
    **{
        reduction: Layer(
            functools.partial(loss_of_rows, reduction=reduction),
            lambda: (normal(0, 8, 12, D), normal(1, D, V), normal(2, V), LABELS),
            lambda x, w: [x, w, P(*w[1:2]), P(*x[:2])],
            "float32",
        )
        for reduction in ("mean", "sum", "none", "log_prob", "several", "divergence")
    },
    "classes": Layer(
        functools.partial(loss_of_rows, reduction="classes"),
        lambda: (normal(0, 8, 12, D), normal(1, D, V), normal(2, V), np.abs(LABELS) % V),
        lambda x, w: [x, w, P(*w[1:2]), P(*x[:2])],
        "float32",
    ),
    # No axis of the rows is divisible by a number of devices.
    "odd rows": Layer(
        functools.partial(loss_of_rows, reduction="mean"),
        lambda: (normal(0, 3, 5, D), normal(1, D, V), normal(2, V), LABELS[:3, :5]),
        lambda x, w: [x, w, P(*w[1:2]), P(*x[:2])],
        "float32",
    ),
}


@functools.cache
def operands_of(name):
    layer = LAYERS[name]
    return [jnp.asarray(a, layer.dtype if a.dtype == float else None) for a in layer.arrays()]


def floats(name):
    return tuple(i for i, a in enumerate(operands_of(name)) if a.dtype != "int32")


def step_of(name, order=1, **options):
    """Return a function that computes the loss and its gradients.

    If `order` is 2, it computes tangents of the gradients instead.
    """
    loss = functools.partial(LAYERS[name].loss, **options)
    wrt = floats(name)
    if order == 1:
        return jax.value_and_grad(loss, wrt)

    def along(*operands):
        first, rest = operands[: len(wrt)], operands[len(wrt) :]
        return jax.jvp(lambda *a: jax.grad(loss, wrt)(*a, *rest), first, (*map(jnp.cos, first),))

    return along


@functools.cache
def on_one_device(name, order):
    return analyse(step_of(name, order), *operands_of(name))


def check(results, name, order=1):
    assert_analysed(results, on_one_device(name, order))


def placed(name, kind, layout):
    """Return three things: a mesh, the operands sharded over it, and their shardings."""
    mesh, specs = mesh_of(Case("", MESH, P()), kind), LAYERS[name].specs(layout.x, layout.weight)
    return mesh, in_shards(operands_of(name), mesh, specs), specs


def over_shards(function, mesh, specs, *axes, reduce=jax.lax.psum):
    """Return `function` inside `jax.shard_map`, with its result reduced over mesh axes."""

    def run(*shards):
        return reduce(function(*shards), axes)

    return jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=P())


@pytest.fixture(autouse=True)
def types(request):
    """Enable 64-bit types, except for losses."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    with jax.enable_x64(name is None or LAYERS[name].dtype == "float64"):
        yield


# ----------------------------------------------------------------------------------------- layouts

SUMS, GATHERED = {"all-reduce"}, {"all-reduce", "all-gather"}
FSDP = {"all-reduce", "all-gather", "reduce-scatter"}


class Layout(NamedTuple):
    """How x and the weight are sharded, and which collectives a step runs.

    Attributes:
      exchanges: the names of the collectives.
      out: the sharding that the test requests for the matmul's result, or None. JAX
        reduce-scatters partial sums only if such a sharding is requested.
      in_loop: True if classes are split, so that the loop over chunks exchanges statistics.
    """

    x: P
    weight: P
    exchanges: set[str]
    out: P | None = None
    in_loop: bool = False


GATED = {
    "rows": Layout(P("data", "model"), P(), SUMS),
    "rows and n": Layout(P("data"), P(None, "model"), SUMS),
    "f": Layout(P("data", None, "model"), P("model"), SUMS, P("data")),
    "f, of a sequence": Layout(
        P("data", None, "model"),
        P("model"),
        GATHERED | {"all-to-all", "collective-permute"},
        P("data", "model"),
    ),
    "FSDP over f": Layout(P(("data", "model")), P(("data", "model")), GATHERED),
    "FSDP over n": Layout(P("data"), P(None, "data"), GATHERED),
    "f, and FSDP over n": Layout(P("data", None, "model"), P("model", "data"), GATHERED, P("data")),
}
NORM = {
    "rows": Layout(P("data", "model"), P(), SUMS),
    "rows and n": Layout(P("data"), P(None, "model"), SUMS),
    "FSDP over d": Layout(P(("data", "model")), P(("data", "model")), GATHERED),
    "FSDP over d, and n": Layout(P("data"), P("data", "model"), GATHERED),
    "FSDP over n": Layout(P("data"), P(None, "data"), GATHERED),
    "x over d": Layout(P("data", None, "model"), P("model"), SUMS),
}
LOSS = {
    "rows": Layout(P("data", "model"), P(), SUMS),
    "rows and V": Layout(P("data"), P(None, "model"), SUMS, in_loop=True),
    "FSDP over d": Layout(P(("data", "model")), P(("data", "model")), FSDP),
    # A device could gather all 96 rows of x or all 64 columns of the weight. A row of x is as long
    # as a column of the weight, so the 64 columns have fewer bytes. The device gathers these.
    "FSDP over V": Layout(P("data"), P(None, "data"), FSDP),
    # A device could gather the 24 rows of x in its part of the batch, or all 64 columns of the
    # weight. The 24 rows have fewer bytes. The device gathers these.
    "sequence and V": Layout(P("data", "model"), P(None, "model"), FSDP, in_loop=True),
    "FSDP over d, and V": Layout(P("data"), P("data", "model"), FSDP, in_loop=True),
    "V over data and model": Layout(P("data"), P(None, ("data", "model")), FSDP),
    # x is replicated, so a device could process any of its rows. Devices along the mesh axis "data"
    # process different rows. Devices along the axis "model" process the same rows, because this
    # axis splits the classes.
    "weight alone": Layout(P(), P("data", "model"), FSDP, in_loop=True),
    "d of x": Layout(
        P(None, None, "data"), P("data", "model"), FSDP | {"all-to-all"}, in_loop=True
    ),
    "d of x over both": Layout(P(None, None, ("data", "model")), P(), SUMS | {"all-to-all"}),
    "d of x and of weight": Layout(P("data", None, "model"), P("model"), FSDP | {"all-to-all"}),
}
LAYOUTS = {"gated_linear": GATED, "rms_norm_linear": NORM, "mean": LOSS, "log_prob": LOSS}
LAYOUTS |= {"several": LOSS, "divergence": LOSS}


# These losses differ from the others only in the formula of a chunk. So each of their layouts is
# tested with only one kind of mesh axes.
VARIANTS = ["several", "divergence"]


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [
        (name, layout, kind)
        for name in LAYOUTS
        for i, layout in enumerate(LAYOUTS[name])
        for j, kind in enumerate(["explicit", "auto"])
        if name not in VARIANTS or (i + j + VARIANTS.index(name)) % 2
    ],
)
def test_layouts(name, layout, kind):
    """Values are correct, gradients are sharded like their operands, and few arrays are exchanged.

    Devices may exchange parameters and sums. They exchange an array with one row per row of x only
    if a requested sharding requires this.
    """
    its, is_explicit = LAYOUTS[name][layout], kind == "explicit"
    mesh, sharded, specs = placed(name, kind, its)
    lies = tuple(NamedSharding(mesh, specs[i]) for i in floats(name))
    step = step_of(name, **({"out_sharding": its.out} if its.out and is_explicit else {}))
    outs = None if is_explicit else (NamedSharding(mesh, P()), lies)
    compiled = jax.jit(step, out_shardings=outs).lower(*sharded).compile()
    results = compiled(*sharded)
    check(results, name)
    for gradient, sharding in zip(results[1], lies, strict=True):
        assert gradient.sharding.is_equivalent_to(sharding, gradient.ndim)
    if LAYERS[name].dtype == "float32":
        check_loop(compiled.as_text(), its)
    elif is_explicit or name == "rms_norm_linear":
        assert {*collectives(compiled)} <= its.exchanges


def check_loop(text, layout):
    """Assert that loops over chunks exchange only statistics."""
    found = exchanged(text.splitlines())
    # If the rows of x are not sharded, an all-gather of the results, one or two numbers per row, is
    # allowed.
    of_rows = [("all-gather", 8 * 12), ("all-gather", 8 * 12 * 2)]
    names = {name for name, size in found if (name, size) not in of_rows}
    assert names == layout.exchanges
    shards = math.prod(MESH[name] for name in jax.tree.leaves(tuple(layout.weight)))
    most = D * max(V // shards, 96 // MESH["data"])
    assert all(size <= most for name, size in found if name == "all-reduce")
    computations = dict(_computations(text))
    bodies = re.findall(r"body=%?([\w.\-]+)", text)
    found = exchanged(line for body in bodies for *_, line in computations[body])
    # A chunk has four rows, and a row has at most four statistics.
    assert all(name == "all-reduce" and size <= 4 * 4 for name, size in found), found
    assert bool(found) == layout.in_loop


def exchanged(lines):
    """Return a pair for each exchanged array: the collective's name, and the number of elements."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return [
        (name, math.prod(int(n) for n in shape.split(",") if n))
        for line in lines
        for shapes, name in re.findall(rf"= (\(?[^=]*?) ({names})(?:-start)?\(", line)
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("gated_linear", layout) for layout in ("f", "f, and FSDP over n")),
        *(("rms_norm_linear", layout) for layout in ("FSDP over d, and n", "x over d")),
        *((name, "rows and V") for name in ("mean", "log_prob", "divergence")),
    ],
)
def test_second_order(name, layout):
    its = LAYOUTS[name][layout]
    _, sharded, _ = placed(name, "explicit", its)
    options = {"out_sharding": its.out} if its.out else {}
    check(jax.jit(step_of(name, 2, **options))(*sharded), name, 2)


def test_explicit_and_auto_axes():
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    specs = LAYERS["gated_linear"].specs(P("data"), P())
    sharded = in_shards(operands_of("gated_linear"), mesh, specs)
    with jax.set_mesh(mesh):
        check(jax.jit(step_of("gated_linear"))(*sharded), "gated_linear")


# ------------------------------------------------------------------------------- in jax.shard_map


def summed(value, *axes):
    return jax.lax.psum(value, axes)


def gated_on_shards(layout, gate, up, weight, bias):
    """Compute the loss inside `jax.shard_map`.

    The loss is summed over the devices. So the gradient of a weight also is a sum over all devices.
    """
    products = (
        functools.partial(jaxnorm.gated_linear, gate, up, weight),
        functools.partial(jaxnorm.activation_linear, gate, weight),
    )
    if layout == "f":
        results = (summed(product(), "model") + bias for product in products)
        return summed(sum(jnp.sum(jnp.sin(y)) for y in results), "data")
    results = (product(bias=bias) for product in products)
    return summed(sum(jnp.sum(jnp.sin(y)) for y in results), "data", "model")


def norm_on_shards(layout, x, residual, weight, scale, bias, **options):
    given = {"bias": bias, "residual": residual, "activation": "gelu"}
    y, h = rms_norm_linear(x, weight, scale, **given, **options)
    of_h = ("data",) if layout == "rows and n" else ("data", "model")
    return summed(jnp.sum(jnp.sin(y)), "data", "model") + summed(jnp.sum(jnp.sin(h)), *of_h)


def on_shards(name, layout, **options):
    """Return two things: a function that computes a loss inside `jax.shard_map`, and its operands.

    In the layout "FSDP over d", `jax.shard_map` gathers all operands except the first two.
    """
    mesh, sharded, specs = placed(name, "manual", LAYOUTS[name][layout])
    function = gated_on_shards if name == "gated_linear" else norm_on_shards
    if layout == "FSDP over d":
        specs = [*specs[:2], P(), P(), P()]
    run = functools.partial(function, layout, **options)
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=P()), sharded


@pytest.mark.parametrize("layout", ["rows and n", "f"])
def test_gated_linear_on_shards(layout):
    function, sharded = on_shards("gated_linear", layout)
    check(jax.jit(jax.value_and_grad(function, range(4)))(*sharded), "gated_linear")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows and n", "FSDP over d"])
def test_the_norm_s_kernel_gets_shards(layout, kind):
    name = "rms_norm_linear"
    on_one_device(name, 1)  # Cache the expected results of XLA's code.
    function, (_, sharded, _) = norm_loss, placed(name, kind, NORM[layout])
    if kind == "manual":
        function, sharded = on_shards(name, layout)
    with as_default(Kernels()) as kernels:
        check(jax.jit(jax.value_and_grad(function, range(5)))(*sharded), name)
    assert {*kernels.shapes} == {(12 if layout == "rows and n" else 6, D)}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_kernel_gets_no_part_of_x_s_columns(kind):
    name = "rms_norm_linear"
    on_one_device(name, 1)
    _, sharded, _ = placed(name, kind, NORM["x over d"])
    with as_default(Kernels()) as kernels:
        check(jax.jit(step_of(name))(*sharded), name)
    assert not kernels.shapes


@pytest.fixture
def product_kernel(monkeypatch):
    """Replace Mosaic's kernel by plain JAX, which computes rms_norm and then a matmul.

    Return a list. Each call of the replacement appends the shapes of x and of the weight to it.
    """
    shapes = []

    def kernel(x, weight, scale, bias, *, activation, **options):
        shapes.append((x.shape, weight.shape))
        return rms_norm_linear(x, weight, scale, bias=bias, activation=activation)

    from jaxnorm_kernels import mosaic

    monkeypatch.setattr(mosaic, "rms_norm_linear_fwd", kernel)
    here = mosaic.IMPLEMENTATION._replace(platforms=lambda: ("cpu",))
    monkeypatch.setattr(mosaic, "IMPLEMENTATION", here)
    monkeypatch.setattr(mosaic.linear, "why_unsupported", lambda *_: None)
    return shapes


def test_the_kernel_of_norm_and_product_on_shards(product_kernel):
    """In `jax.shard_map`, implementation="mosaic" runs the kernel on each shard.

    The derivative is that of rms_norm followed by a matmul.
    """
    function, sharded = on_shards("rms_norm_linear", "rows and n", implementation="mosaic")
    check(jax.jit(jax.value_and_grad(function, range(5)))(*sharded), "rms_norm_linear")
    assert {*product_kernel} == {((12, D), (D, F // 2))}


@pytest.mark.usefixtures("product_kernel")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_kernel_of_norm_and_product_is_not_partitioned(kind):
    _, (x, _, weight, *_), _ = placed("rms_norm_linear", kind, NORM["rows and n"])
    named = functools.partial(rms_norm_linear, implementation="mosaic")
    message = (
        r"^rms_norm_linear: implementation='mosaic' is a kernel of whole arrays, .* a mesh with "
        r"axes {'data': 4, 'model': 2}; expected one device, or shards; call it inside "
        r"jax.shard_map over these axes, or leave implementation out"
    )
    for call in (named, jax.jit(named)):
        with pytest.raises(ValueError, match=message):
            call(x, weight)


@pytest.mark.parametrize("name", ["none", *VARIANTS, "log_prob"])
def test_losses_of_rows_on_shards(name):
    mesh, sharded, specs = placed(name, "manual", LOSS["rows"])
    function = over_shards(LAYERS[name].loss, mesh, specs, "data", "model")
    check(jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*sharded), name)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("none", "rows and V"), ("classes", "rows and V"), ("classes", "d of x")),
        ("odd rows", "d of x over both"),
    ],
)
def test_other_shapes(name, layout, kind):
    """A mask of classes is split like the classes, and rows need not be divisible.

    Losses of rows are added after the call.
    """
    _, sharded, _ = placed(name, kind, LOSS[layout])
    check(jax.jit(step_of(name))(*sharded), name)


@each_pair("kind layout name", KINDS, ["rows", "rows and V"], ["sum", "log_prob"])
def test_kernels_get_chunks_of_shards(kind, layout, name):
    """Kernels run on the chunks of a shard. If classes are split, XLA's code runs instead.

    Each sum over classes then needs an exchange between devices, which a kernel cannot do.
    """
    function, (mesh, sharded, _) = LAYERS[name].loss, placed(name, kind, LOSS[layout])
    if kind == "manual":
        specs = P("data"), P(), P(), P("data")
        function = over_shards(function, mesh, specs, "data")
    with as_default(Kernels()) as kernels:
        jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*sharded)
    chunks = [] if layout == "rows and V" and kind != "manual" else [(4, V)]
    assert sorted({*kernels.shapes}) == chunks


@pytest.mark.parametrize("name", ["mean"])
def test_a_mean_inside_shard_map(name):
    """In `jax.shard_map`, a loss's mean is taken over the rows of a shard.

    The gradients of replicated operands are summed over the devices.
    """
    loss, (mesh, sharded, specs) = LAYERS[name].loss, placed(name, "auto", LOSS["rows"])
    mapped = over_shards(loss, mesh, specs, "data", "model", reduce=jax.lax.pmean)

    def whole(x, weight, bias, labels):
        parts = [np.s_[i : i + 2, j : j + 6] for i in range(0, 8, 2) for j in (0, 6)]
        return sum(loss(x[part], weight, bias, labels[part]) for part in parts) / 8

    ours, theirs = (jax.value_and_grad(f, (0, 1, 2)) for f in (mapped, whole))
    assert_computes(jax.jit(ours)(*sharded), theirs, *operands_of(name))


# ------------------------------------------------------------ the sharding of a matmul's result


def gated_operands(layout, kind="explicit"):
    mesh, sharded, _ = placed("gated_linear", kind, GATED[layout])
    return mesh, *sharded


@pytest.mark.parametrize("compiles", [True, False])
def test_where_the_result_lies(compiles):
    """The result has the requested sharding. By default, its rows are sharded like gate's rows.

    The requested sharding may be a PartitionSpec or a NamedSharding, even outside of `jax.jit`.
    """
    mesh, *_ = gated_operands("f")
    for layout, asked, expected in (
        ("f", P("data"), P("data", None, None)),
        ("f", NamedSharding(mesh, P("data", "model")), P("data", "model", None)),
        ("f", P(None, None, "model"), P(None, None, "model")),
        ("rows and n", None, P("data", None, "model")),
        ("rows and n", P(), P(None, None, None)),
        ("FSDP over n", None, P("data", None, None)),
    ):
        _, gate, up, weight, bias = gated_operands(layout)
        for more in ({}, {"bias": bias}):
            call = functools.partial(jaxnorm.gated_linear, out_sharding=asked, **more)
            y = (jax.jit(call) if compiles else call)(gate, up, weight)
            assert jax.typeof(y).sharding.spec == expected


def test_it_must_be_said_where_sums_lie():
    _, gate, up, weight, _ = gated_operands("f")
    message = (
        r"^gated_linear: the mesh axes \('model',\) split the last axis of .* out_sharding=None; "
        r"expected how the sums lie: give out_sharding="
    )
    for call in (jaxnorm.gated_linear, jax.jit(jaxnorm.gated_linear)):
        with pytest.raises(ValueError, match=message):
            call(gate, up, weight)
    # On Auto axes, an array's type has no sharding, so the mesh of a PartitionSpec is unknown.
    _, *auto, _ = gated_operands("f", "auto")
    with pytest.raises(ValueError, match=r"^gated_linear: out_sharding=.*with_sharding_constraint"):
        jaxnorm.gated_linear(*auto, out_sharding=P("data"))


def test_up_lies_as_gate_does():
    mesh, gate, _, weight, _ = gated_operands("rows")
    arrays = operands_of("gated_linear")[:3]
    up = jax.device_put(arrays[1], NamedSharding(mesh, P(None, "model")))
    y = jaxnorm.gated_linear(gate, up, weight)
    assert jax.typeof(y).sharding.spec == P("data", "model", None)
    assert_computes(y, jaxnorm.gated_linear, *arrays)


def test_a_weight_is_kept_in_its_shards():
    """The saved weight is sharded: with FSDP, the backward gathers it again."""
    _, *sharded, _ = gated_operands("f, and FSDP over n")

    def residuals(*arrays):
        function = functools.partial(jaxnorm.gated_linear, out_sharding=P("data"))
        return jax.tree.leaves(jax.vjp(function, *arrays)[1])

    kept = jax.make_jaxpr(residuals)(*sharded).jaxpr
    inputs = {*kept.invars, *kept.constvars}
    assert [v for v in kept.outvars if v.aval.ndim and v not in inputs] == []


def test_a_function_on_a_mesh():
    """A function given as `product` can set the sharding of gated_linear's result."""
    mesh, *sharded = gated_operands("f")

    def loss(product, gate, up, weight, bias):
        y = jaxnorm.gated_linear(gate, up, weight, bias=bias, product=product, activation=jnp.tanh)
        return jnp.sum(jnp.sin(y))

    def spread(h, weight):
        return jnp.matmul(h, weight, out_sharding=NamedSharding(mesh, P("data")))

    ours, theirs = (
        jax.value_and_grad(functools.partial(loss, product), range(4))
        for product in (spread, jnp.matmul)
    )
    assert_computes(jax.jit(ours)(*sharded), theirs, *operands_of("gated_linear"))


def test_the_kernel_of_norm_and_product_lowers_on_shards():
    """In `jax.shard_map`, the kernel's result varies over the same mesh axes as its operands."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    named = functools.partial(rms_norm_linear, activation="gelu", implementation="mosaic")
    shards = jax.shard_map(named, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    shapes = ((8192, 1024), "bfloat16"), ((1024, 1024), "bfloat16"), ((1024,), "float32")
    assert kernels_in(shards, *[jax.ShapeDtypeStruct(*shape) for shape in shapes])
