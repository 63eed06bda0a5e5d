"""Functions of logits on a mesh: split rows or a split vocabulary, on every kind of mesh axis."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_cases import operands
from meshes import (
    Case,
    collectives,
    eight_devices,
    in_shards,
    mesh_of,
    which_kernels,  # noqa: F401
)
from program_error import analyse, assert_analysed

import jaxnorm
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]

SHAPE = (8, 4, 128)
MESH = {"data": 4, "model": 2}
VOCABULARY = P("data", None, "model")
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 8.0}


def loss(x, labels, axis=-1, where=None, **options):
    return cross_entropy(x, labels, axis, where, **options, **OPTIONS)


def log_prob(x, labels, axis=-1, where=None, **options):
    where = None if where is None else where != 0
    options |= {"logit_softcap": 8.0}
    of_labels, entropy = jaxnorm.log_prob_and_entropy(x, labels, axis, where, **options)
    return jnp.sin(of_labels) - 0.7 * entropy**2


each = pytest.mark.parametrize("function", [loss, log_prob])
# If the vocabulary is split, devices exchange a few numbers per row in two or three steps. For each
# function, the list says how many numbers per row are exchanged in each step. In the first step,
# devices exchange one number, the row's maximum. In later steps, they exchange sums.
EXCHANGED = {loss: [1, 3], log_prob: [1, 1, 2]}


def step(x, labels, where, d, *, function, **options):
    loss, vjp = jax.vjp(lambda x: function(x, labels, where=where, **options), x)
    return loss, *vjp(d)


def arrays():
    x, labels, d = operands(SHAPE, "float32")
    weights = jnp.where(labels > 0, labels % 3 - 0.5, 0)
    return x, labels.at[0, 0].set(-1).at[1, 1].set(-100), weights, d


def placed(mesh, spec):
    """Shard the arrays. The logits have the sharding `spec`.

    The other arrays have one number per row. They are sharded like the first axes of the logits.
    """
    specs = [spec, *[P(*spec[:2])] * 3]
    return in_shards(arrays(), mesh, specs), specs


@functools.cache
def expected_of(function):
    return analyse(functools.partial(step, function=function), *arrays())


def check(results, function, spec=None):
    """Assert that values are correct and that the gradient has the sharding `spec`."""
    assert_analysed(results, expected_of(function))
    if spec is not None:
        _, dx = results
        assert dx.sharding.is_equivalent_to(NamedSharding(dx.sharding.mesh, spec), dx.ndim)


def sizes(found):
    return [math.prod(int(n) for n in shape.split(",") if n) for v in found.values() for shape in v]


@each
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vocabulary_split(kernels, kind, function):
    """If the vocabulary is split, devices exchange only maxima and sums of rows, not logits.

    On Auto axes without kernels, XLA partitions the code itself. It may then gather the partial
    maxima or sums of both shards of a row, instead of reducing them to one number.
    """
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, _ = placed(mesh, VOCABULARY)
    compiled = jax.jit(functools.partial(step, function=function)).lower(*sharded).compile()
    check(compiled(*sharded), function, VOCABULARY)
    found = collectives(compiled)
    rows = SHAPE[0] * SHAPE[1] // 4
    if kernels is None and kind == "auto":
        assert max(sizes(found)) <= 2 * rows
    else:
        assert set(found) == {"all-reduce"}
        assert sorted(sizes(found)) == [count * rows for count in EXCHANGED[function]]
    assert kernels is None or not kernels.shapes


@each
def test_vocabulary_split_beside_manual_rows(function):
    """Inside a `jax.shard_map` that splits the rows, another mesh axis may split the vocabulary.

    The axis of the rows is manual, and the axis of the vocabulary is Explicit.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharded, _ = placed(mesh, VOCABULARY)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            functools.partial(step, function=function),
            in_specs=P("data"),
            out_specs=(P("data"), P("data")),
            axis_names={"data"},
        )
        compiled = jax.jit(mapped).lower(*sharded).compile()
        check(compiled(*sharded), function)
    assert set(collectives(compiled)) == {"all-reduce"}
    assert max(sizes(collectives(compiled))) <= 3 * SHAPE[0] * SHAPE[1]


def functions_of_layout(x, labels):
    """Return functions of `where` and `logits_scale`, for the logits x."""
    classes = jnp.cos(jnp.arange(SHAPE[-1] * 16.0)).reshape(SHAPE[-1], 16)
    several = jnp.stack([labels, labels], -1)
    linear = jaxnorm.linear_log_prob_and_entropy
    return {
        "loss": functools.partial(cross_entropy, x, labels),
        "log_prob": functools.partial(jaxnorm.log_prob_and_entropy, x, labels),
        "several": functools.partial(jaxnorm.log_prob_and_entropy, x, several),
        "divergence": functools.partial(jaxnorm.kl_divergence, x, jnp.sin(x)),
        "linear": functools.partial(linear, x, classes, labels % 16, chunk=8),
    }


@pytest.mark.parametrize("name", ["loss", "log_prob", "several", "divergence", "linear"])
def test_weights_and_scales_in_another_layout(name):
    """On an Explicit mesh, float weights and scales need not be sharded like the logits."""
    x, labels, _ = operands(SHAPE, "float32")

    def run(x, weights, scales):
        def function(x):
            return functions_of_layout(x, labels)[name](where=weights, logits_scale=scales)

        results, vjp = jax.vjp(function, x)
        return results, vjp(results)

    arrays = x, jnp.cos(labels.astype(jnp.float32)), 1 / (1 + labels % 3)
    expected = analyse(run, *arrays)
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    specs = P("data", "model"), P("model", "data"), P("model", "data")
    with jax.set_mesh(mesh):
        assert_analysed(jax.jit(run)(*in_shards(arrays, mesh, specs)), expected)
