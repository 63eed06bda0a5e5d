"""Inside `jax.set_mesh`: arrays that name no mesh axis, and batches that one splits.

Every framework sets a mesh, on one device, too. Arrays there are replicated, or not committed to
any device, in which case their types say nothing of the mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import in_shards
from pairs import pairwise
from program_error import analyse, assert_analysed
from stand_in import StandIn, as_default

import jaxnorm
from jaxnorm_kernels import xla

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]
on_eight_devices = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="for eight CPU devices"
)

ROWS, COLS, CLASSES = 16, 64, 1000


class Kernels(StandIn):
    """Kernels of whole rows, which see no mesh: all axes are those of a manual region, or none."""

    def __getattr__(self, name):
        function = getattr(xla, name)

        def launch(operands, *rest):
            x, *_ = operands if isinstance(operands, tuple) else [operands]
            assert AxisType.Explicit not in jax.typeof(x).sharding.mesh.axis_types
            self.shapes.append(x.shape)
            return function(operands, *rest)

        return launch

    def why_unsupported(self, spec):
        return "plain JAX's" if getattr(spec, "plain", not spec.cols) or spec.cols_over else None


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


X, R, SCALE, WEIGHT = (
    normal(ROWS, COLS),
    normal(ROWS, COLS, seed=1),
    1 + 0.1 * normal(COLS),
    normal(COLS, CLASSES),
)
LABELS = jnp.arange(ROWS) % CLASSES

# Each with its operands; all are differentiated.
CALLS = {
    "softmax": (jaxnorm.softmax, (X,)),
    "log_softmax": (jaxnorm.log_softmax, (X,)),
    "layer_norm": (jaxnorm.layer_norm, (X, SCALE, SCALE)),
    "rms_norm": (jaxnorm.rms_norm, (X, SCALE)),
    "add_layer_norm": (jaxnorm.add_layer_norm, (X, R, SCALE, SCALE)),
    "add_rms_norm": (jaxnorm.add_rms_norm, (X, R, SCALE)),
    "add_rms_norm with a gate": (
        lambda x, r, s, gate: jaxnorm.add_rms_norm(x, r, s, gate=gate),
        (X, R, SCALE, SCALE),
    ),
    "rms_norm_add": (jaxnorm.rms_norm_add, (X, R, SCALE)),
    "rms_norm_add_rms_norm": (jaxnorm.rms_norm_add_rms_norm, (X, R, SCALE, SCALE)),
    "layer_norm silu": (
        functools.partial(jaxnorm.layer_norm, activation="silu"),
        (X, SCALE, SCALE),
    ),
    "rms_norm_gated": (jaxnorm.rms_norm_gated, (X, R, SCALE)),
    "cross_entropy": (
        functools.partial(jaxnorm.softmax_cross_entropy_with_integer_labels, labels=LABELS),
        (normal(ROWS, CLASSES),),
    ),
    "log_prob_and_entropy": (
        functools.partial(jaxnorm.log_prob_and_entropy, labels=LABELS),
        (normal(ROWS, CLASSES),),
    ),
    "rms_norm_linear": (jaxnorm.rms_norm_linear, (X, WEIGHT, SCALE)),
    # Of these a kernel is the norm's.
    "gated_linear": (
        lambda x, r, w: jaxnorm.gated_linear(jaxnorm.rms_norm(x), r, w),
        (X, R, WEIGHT),
    ),
    "activation_linear": (
        lambda x, w: jaxnorm.activation_linear(jaxnorm.rms_norm(x), w),
        (X, WEIGHT),
    ),
    "linear_loss": (
        lambda x, w: jaxnorm.linear_softmax_cross_entropy(x, w, LABELS),
        (X, WEIGHT),
    ),
    "linear_losses": (
        lambda x, w: jaxnorm.linear_softmax_cross_entropy(x, w, LABELS, reduction="none", chunk=8),
        (X, WEIGHT),
    ),
    "linear_log_prob": (
        lambda x, w: jaxnorm.linear_log_prob_and_entropy(x, w, LABELS, chunk=8),
        (X, WEIGHT),
    ),
}
MESHES = {
    "eight": ((8,), ("data",), (AxisType.Explicit,)),
    "one": ((1,), ("data",), (AxisType.Explicit,)),
    "explicit-auto": ((4, 2), ("data", "model"), (AxisType.Explicit, AxisType.Auto)),
    "auto-explicit": ((4, 2), ("data", "model"), (AxisType.Auto, AxisType.Explicit)),
}
PLACES = ("replicated", "uncommitted", "first", "others")


def loss_of(function):
    def loss(*operands):
        results = jax.tree.leaves(function(*operands))
        return sum(jnp.sum(jnp.sin(a)) for a in results), results

    return jax.value_and_grad(loss, argnums=range(function.operands), has_aux=True)


def call_of(name):
    function, operands = CALLS[name]
    wrapped = functools.partial(function)
    wrapped.operands = len(operands)
    return loss_of(wrapped), operands


@functools.cache
def on_one_device(name):
    run, operands = call_of(name)
    return analyse(run, *operands)


def mesh_of(name):
    sizes, names, types = MESHES[name]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def placed(operands, mesh, place):
    """`operands`, replicated over the mesh or as they are: all alike, or the first otherwise."""

    def is_committed(i):
        return place == "replicated" or (place == "first" and not i) or (place == "others" and i)

    whole = NamedSharding(mesh, P())
    return [jax.device_put(a, whole) if is_committed(i) else a for i, a in enumerate(operands)]


@on_eight_devices
@pytest.mark.parametrize(("name", "mesh", "place"), pairwise([*CALLS], [*MESHES], PLACES))
def test_no_axis_is_named(name, mesh, place):
    expected, (run, operands) = on_one_device(name), call_of(name)
    devices = mesh_of(mesh)
    with as_default(Kernels()) as kernels, jax.set_mesh(devices):
        assert_analysed(jax.jit(run)(*placed(operands, devices, place)), expected)
        # Beside automatic axes of more than one device nothing runs but XLA's code.
        assert bool(kernels.shapes) == (len(MESHES[mesh][0]) == 1)


@on_eight_devices
@pytest.mark.parametrize("place", ["replicated", "uncommitted"])
@pytest.mark.parametrize("name", CALLS)
def test_outside_of_jit(name, place):
    mesh = mesh_of("eight")
    function, operands = CALLS[name]
    expected = analyse(function, *operands)
    with as_default(Kernels()) as kernels, jax.set_mesh(mesh):
        assert_analysed(function(*placed(operands, mesh, place)), expected)
        assert kernels.shapes


@on_eight_devices
@pytest.mark.parametrize("name", CALLS)
def test_a_part_with_automatic_axes(name):
    """`jax.sharding.auto_axes` on an Explicit mesh: XLA's code; nothing partitions kernels."""
    run, operands = call_of(name)
    mesh = mesh_of("eight")
    part, expected = jax.sharding.auto_axes(run, out_sharding=P()), on_one_device(name)
    first, *others = operands
    with as_default(Kernels()), jax.set_mesh(mesh):
        for spec in (P(), P("data")):
            arrays = *in_shards([first], mesh, [spec]), *others
            assert_analysed(jax.jit(part)(*arrays), expected)


@on_eight_devices
@pytest.mark.parametrize("over", [P(), P("data")], ids=["replicated", "split"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_compiled(name, over):
    """With `jax.disable_jit`, which is there to see each step; rows are split, or are not."""
    function, operands = CALLS[name]
    expected = analyse(function, *operands)
    mesh = mesh_of("eight")
    first, *others = operands
    with jax.set_mesh(mesh), jax.disable_jit():
        assert_analysed(
            function(jax.device_put(first, NamedSharding(mesh, over)), *others), expected
        )


@on_eight_devices
@pytest.mark.parametrize("name", [*[*CALLS][-3:], "rms_norm", "softmax"])
def test_xla_s_code(name):
    """As it runs where there is no kernel."""
    mesh = mesh_of("eight")
    (run, operands), expected = call_of(name), on_one_device(name)
    with jax.set_mesh(mesh):
        for place in PLACES:
            assert_analysed(jax.jit(run)(*placed(operands, mesh, place)), expected)


@on_eight_devices
@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name):
    run, operands = call_of(name)

    def second(*operands):
        return jax.jvp(lambda *a: run(*a)[1], operands, tuple(map(jnp.cos, operands)))[1]

    expected = analyse(second, *operands)
    mesh = mesh_of("eight")
    with as_default(Kernels()), jax.set_mesh(mesh):
        results = jax.jit(second)(*placed(operands, mesh, "others"))
    assert_analysed(results, expected)


@on_eight_devices
def test_a_mesh_without_devices():
    """Programs for an `AbstractMesh` hold kernels, too, for as many devices as it will have."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    function, operands = CALLS["rms_norm"]
    specs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P())) for a in operands
    ]
    with as_default(Kernels()) as kernels:
        jax.jit(function).trace(*specs).lower(lowering_platforms=("cpu",))
        assert kernels.shapes == [(ROWS, COLS)]


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_on_a_mesh_of_gpus(name, place):
    """Of one GPU, or of as many as there are."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    (run, operands), expected = call_of(name), on_one_device(name)
    with jax.set_mesh(mesh):
        arrays = placed(operands, mesh, place)
        compiled = jax.jit(run).lower(*arrays).compile()
        assert_analysed(compiled(*arrays), expected)
    # The kernels that run without a mesh, whatever they are.
    alone = jax.jit(run).lower(*operands).compile()
    assert compiled.as_text().count("mosaic_gpu") == alone.as_text().count("mosaic_gpu")


# ----------------------------------------------------------------- a batch that mesh axes split

BATCH = 8
XS, WEIGHTS = normal(BATCH, ROWS, COLS), normal(BATCH, COLS, CLASSES)


def linear_loss(x, w):
    return jaxnorm.linear_softmax_cross_entropy(x, w, LABELS)


def linear_losses(x, w):
    losses = jaxnorm.linear_softmax_cross_entropy(x, w, LABELS, reduction="none")
    return jnp.sum(jnp.sin(losses))


def linear_log_prob(x, w):
    return sum(
        jnp.sum(jnp.sin(a)) for a in jaxnorm.linear_log_prob_and_entropy(x, w, LABELS, chunk=8)
    )


def linear_layer(x, w):
    # Of products of the size of 1: the sine of large ones differs by all of their roundings.
    return jnp.sum(jnp.sin(jaxnorm.rms_norm_linear(x, w / COLS**0.5)))


both = {"argnums": (0, 1)}
BATCHES = {
    "gradient of each": (lambda f: jax.vmap(jax.grad(f, **both), (0, None)), XS, WEIGHT),
    "a weight each": (lambda f: jax.vmap(f), XS, WEIGHTS),
    "gradient of a weight each": (lambda f: jax.vmap(jax.grad(f, **both)), XS, WEIGHTS),
    "one x": (lambda f: jax.vmap(jax.grad(f, **both), (None, 0)), X, WEIGHTS),
    "gradient of all": (
        lambda f: jax.grad(lambda x, w: jnp.sum(jax.vmap(f, (0, None))(x, w)), **both),
        XS,
        WEIGHT,
    ),
    "tangent": (lambda f: lambda x, w: jax.jvp(jax.vmap(f), (x, w), (x, w)), XS, WEIGHTS),
}


@functools.cache
def of_whole_arrays(function, batch):
    transform, x, w = BATCHES[batch]
    return analyse(transform(function), x, w)


# Losses and log-probabilities are one primitive, of one batching rule: the other functions of it
# meet each batch with one layout of the weight, in turn.
WEIGHTS_OVER = [P("data"), P("data", None, "model"), P("data", "model")]
IN_SHARDS = [
    pytest.param(function, batch, over, id=f"{function.__name__}-{batch}-{over}")
    for k, function in enumerate([linear_loss, linear_layer, linear_losses, linear_log_prob])
    for i, batch in enumerate(BATCHES)
    for j, over in enumerate(WEIGHTS_OVER)
    if function in (linear_loss, linear_layer) or (i + k - j) % 3 == 0
]


@on_eight_devices
@pytest.mark.parametrize(("function", "batch", "weight_over"), IN_SHARDS)
def test_a_batch_in_shards(function, batch, weight_over):
    transform, x, w = BATCHES[batch]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    w_spec = weight_over if w.ndim == 3 else P(*weight_over[1:])
    x_spec = P("data") if x.ndim == 3 else P("model")
    with jax.set_mesh(mesh):
        sharded = in_shards((x, w), mesh, (x_spec, w_spec))
        results = jax.tree.leaves(jax.jit(transform(function))(*sharded))
    assert_analysed(results, of_whole_arrays(function, batch))
