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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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


def tempered(logits, label):
    return jax.nn.logsumexp(logits / 2) - logits[label] * jnp.tanh(logits[0])


def of_jaxnorm(logits, label):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label) ** 2


def loss_of(function, **options):
    """Return a loss of x, a weight, a bias and labels, which is one number.

    ``function(x, weight, labels, weights, bias=..., chunk=...)`` computes the logits itself.
    """

    def loss(x, weight, bias, labels):
        weights = jnp.where(labels >= 0, labels % 4 - 0.5, 0.0)
        results = function(x, weight, labels, weights, bias=bias, chunk=4, **options)
        return sum(jnp.sum(jnp.sin(result)) for result in jax.tree.leaves(results))

    return loss


def cross_entropy(x, weight, labels, weights, **options):
    options |= {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 8.0}
    return jaxnorm.linear_softmax_cross_entropy(x, weight, labels, where=weights, **options)


def log_prob(x, weight, labels, weights, *, of=lambda labels: labels, **options):
    options |= {"where": weights, "logit_softcap": 8.0}
    return jaxnorm.linear_log_prob_and_entropy(x, weight, of(labels), **options)


def of_classes(x, weight, labels, weights, **options):
    where = jnp.arange(V)[None, None] % 5 != 2
    return jaxnorm.linear_log_prob_and_entropy(x, weight, labels, where=where, **options)


def divergence(x, weight, labels, weights, **options):
    options |= {"where": weights, "logits_scale": scales_of(labels), "reduction": "none"}
    return jaxnorm.linear_kl_divergence(x, weight, *layer_of_a_teacher(labels, weight), **options)


def any_loss(x, weight, labels, weights, *, fun, **options):
    return jaxnorm.linear_loss(fun, x, weight, labels, where=weights, **options)


LOSSES = {
    "mean": loss_of(cross_entropy),
    "sum": loss_of(cross_entropy, reduction="sum"),
    "none": loss_of(cross_entropy, reduction="none"),
    "log_prob": loss_of(log_prob),
    "several": loss_of(
        log_prob, of=lambda labels: jnp.stack([jnp.maximum(labels, 0), (labels + 5) % V], -1)
    ),
    "divergence": loss_of(divergence),
    "classes": loss_of(of_classes),
    "any": loss_of(any_loss, fun=tempered),
    "any of rows": loss_of(any_loss, fun=tempered, reduction="none"),
    "any of a loss": loss_of(any_loss, fun=of_jaxnorm),
}


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


def layer_of_loss(loss, labels=LABELS):
    return Layer(
        loss,
        lambda: (normal(0, *labels.shape, D), normal(1, D, V), normal(2, V), labels),
        lambda x, w: [x, w, P(*w[1:2]), P(*x[:2])],
        "float32",
    )


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
    **{name: layer_of_loss(loss) for name, loss in LOSSES.items()},
    "classes": layer_of_loss(LOSSES["classes"], np.abs(LABELS) % V),
    # No axis of the rows is divisible by a number of devices.
    "odd rows": layer_of_loss(LOSSES["mean"], LABELS[:3, :5]),
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


def on_shards(name, **options):
    """Return two things: a function that computes a loss inside `jax.shard_map`, and its operands.

    The mesh splits the rows. The loss is summed over the devices.
    """
    mesh, sharded, specs = placed(name, "manual", ROWS)

    def run(*shards):
        return jax.lax.psum(LAYERS[name].loss(*shards), ("data", "model"))

    return jax.shard_map(run, mesh=mesh, in_specs=(*specs,), out_specs=P(), **options), sharded


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
        `linear_loss` gathers them instead.
    """

    x: P
    weight: P
    exchanges: set[str]
    out: P | None = None
    in_loop: bool = False


ROWS = Layout(P("data", "model"), P(), SUMS)
GATED = {
    "rows": ROWS,
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
    "rows": ROWS,
    "rows and n": Layout(P("data"), P(None, "model"), SUMS),
    "FSDP over d": Layout(P(("data", "model")), P(("data", "model")), GATHERED),
    "FSDP over d, and n": Layout(P("data"), P("data", "model"), GATHERED),
    "FSDP over n": Layout(P("data"), P(None, "data"), GATHERED),
    "x over d": Layout(P("data", None, "model"), P("model"), SUMS),
}
LOSS = {
    "rows": ROWS,
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
LAYOUTS |= {name: LOSS for name in LOSSES if name.startswith("any")}


# These losses differ from the others only in the formula of a chunk. So each of their layouts is
# tested with only one kind of mesh axes.
VARIANTS = ["several", "divergence", "any", "any of rows", "any of a loss"]


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [
        (name, layout, kind)
        for name in LAYOUTS
        for i, layout in enumerate(LAYOUTS[name])
        for j, kind in enumerate(["explicit", "auto"])
        if name not in VARIANTS or (i + j + VARIANTS.index(name)) % 2
    ]
    # A mask of classes is split like the classes, and rows need not be divisible.
    + [
        (*case, kind)
        for case in [
            *(("none", "rows and V"), ("classes", "rows and V"), ("classes", "d of x")),
            ("odd rows", "d of x over both"),
        ]
        for kind in ("explicit", "auto")
    ],
)
def test_layouts(name, layout, kind):
    """Values are correct, gradients are sharded like their operands, and few arrays are exchanged.

    Devices may exchange parameters and sums. They exchange an array with one row per row of x only
    if a requested sharding requires this.
    """
    its, is_explicit = LAYOUTS.get(name, LOSS)[layout], kind == "explicit"
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
        if name in LAYOUTS and not name.startswith("any"):
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


# ------------------------------------------------------------------------------- in jax.shard_map


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["gated_linear", "none", "log_prob", "divergence", "any of rows"])
def test_on_shards(name, check_vma):
    """Gradients of replicated operands are summed over the devices."""
    function, sharded = on_shards(name, check_vma=check_vma)
    check(jax.jit(jax.value_and_grad(function, floats(name)))(*sharded), name)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_kernel_of_norm_and_product_is_not_partitioned(kind):
    mesh = mesh_of(Case("", MESH, P()), kind)
    arrays = jnp.zeros((64, 64), "bfloat16"), jnp.zeros((64, 64), "bfloat16")
    named = functools.partial(rms_norm_linear, implementation="mosaic")
    message = (
        r"^rms_norm_linear: implementation='mosaic' is a kernel of whole arrays, .* a mesh with "
        r"axes {'data': 4, 'model': 2}; expected one device, or shards; call it inside "
        r"jax.shard_map over these axes, or leave implementation out"
    )
    for call in (named, jax.jit(named)):
        with pytest.raises(ValueError, match=message):
            call(*in_shards(arrays, mesh, [P("data"), P(None, "model")]))


def test_the_kernel_of_norm_and_product_on_shards():
    """In `jax.shard_map`, the kernel's result varies over the same mesh axes as its operands."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    named = functools.partial(rms_norm_linear, activation="gelu", implementation="mosaic")
    shards = jax.shard_map(named, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    shapes = ((8192, 1024), "bfloat16"), ((1024, 1024), "bfloat16"), ((1024,), "float32")
    assert kernels_in(shards, *[jax.ShapeDtypeStruct(*shape) for shape in shapes])


@each_pair("kind layout name", KINDS, ["rows", "rows and V"], ["sum", "log_prob"])
def test_kernels_get_chunks_of_shards(kind, layout, name):
    """Kernels run on the chunks of a shard. If classes are split, XLA's code runs instead.

    Each sum over classes then needs an exchange between devices, which a kernel cannot do.
    """
    function, (_, sharded, _) = LAYERS[name].loss, placed(name, kind, LOSS[layout])
    if kind == "manual":
        function, sharded = on_shards(name)
    with as_default(Kernels()) as kernels:
        jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*sharded)
    chunks = [] if layout == "rows and V" and kind != "manual" else [(4, V)]
    assert sorted({*kernels.shapes}) == chunks


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
    # `up` is resharded like gate.
    _, gate, up, weight, _ = gated_operands("rows")
    y = jaxnorm.gated_linear(
        gate, jax.device_put(up, NamedSharding(mesh, P(None, "model"))), weight
    )
    assert jax.typeof(y).sharding.spec == P("data", "model", None)
    assert_computes(y, jaxnorm.gated_linear, *operands_of("gated_linear")[:3])


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


def test_a_weight_is_kept_in_its_shards():
    """The saved weight is sharded: with FSDP, the backward gathers it again."""
    _, *sharded, _ = gated_operands("f, and FSDP over n")

    def residuals(*arrays):
        function = functools.partial(jaxnorm.gated_linear, out_sharding=P("data"))
        return jax.tree.leaves(jax.vjp(function, *arrays)[1])

    kept = jax.make_jaxpr(residuals)(*sharded).jaxpr
    inputs = {*kept.invars, *kept.constvars}
    assert [v for v in kept.outvars if v.aval.ndim and v not in inputs] == []
