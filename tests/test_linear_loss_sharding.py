"""Functions of linear logits on a mesh: rows split, and weight over V or d."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from log_prob_cases import linear_mixture
from meshes import KINDS, Case, in_shards, mesh_of
from program_error import analyse, assert_analysed, assert_computes
from sharding_cases import which_kernels  # noqa: F401

import jaxnorm
from benchmarks.hlo import _computations

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices"),
    pytest.mark.usefixtures("quick_to_compile"),
]

MESH = {"data": 4, "model": 2}
D, V = 16, 64
SUMS = {"all-reduce"}
FSDP = {"all-reduce", "all-gather", "reduce-scatter"}
# How x's axes and weight's are split, what the compiled step exchanges, and whether the loop over
# chunks does, because the classes are split there.
LAYOUTS = {
    "rows": (P("data", "model"), P(), SUMS, False),
    "rows and V": (P("data"), P(None, "model"), SUMS, True),
    "FSDP over d": (P(("data", "model")), P(("data", "model")), FSDP, False),
    # A device gathers 96 rows of x or 64 columns of weight, whichever is less,
    "FSDP over V": (P("data"), P(None, "data"), FSDP, False),
    # and here 24 rows.
    "sequence and V": (P("data", "model"), P(None, "model"), FSDP, True),
    "FSDP over d, and V": (P("data"), P("data", "model"), FSDP, True),
    "V over data and model": (P("data"), P(None, ("data", "model")), FSDP, False),
    # No axis but that of d is there to split the rows.
    "weight alone": (P(), P("data", "model"), FSDP, True),
    "d of x": (P(None, None, "data"), P("data", "model"), FSDP | {"all-to-all"}, True),
    "d of x over both": (P(None, None, ("data", "model")), P(), SUMS | {"all-to-all"}, False),
    "d of x and of weight": (P("data", None, "model"), P("model"), FSDP | {"all-to-all"}, False),
}


def arrays():
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 12, D), (D, V), (V,))
    )
    labels = jnp.asarray(rng.integers(0, V, (8, 12)), jnp.int32)
    return x, weight, bias, labels.at[0].set(-100)


def loss(x, weight, bias, labels, *, reduction, **options):
    """A mean, a sum, losses of rows ("none"); or of rows log-probabilities and entropies."""
    if reduction == "log_prob":
        options |= {"bias": bias, "where": labels >= 0, "chunk": 4, "logit_softcap": 8.0}
        return jnp.sum(jnp.sin(linear_mixture(x, weight, labels, **options)))
    result = jaxnorm.linear_softmax_cross_entropy(
        x,
        weight,
        labels,
        bias=bias,
        where=jnp.where(labels >= 0, labels % 4 - 0.5, 0.0),
        reduction=reduction,
        chunk=4,
        label_smoothing=0.1,
        z_loss=1e-2,
        logit_softcap=8.0,
        **options,
    )
    return jnp.sum(jnp.sin(result))


def step(*arrays, reduction):
    return jax.value_and_grad(functools.partial(loss, reduction=reduction), (0, 1, 2))(*arrays)


@functools.cache
def expected(reduction):
    return analyse(functools.partial(step, reduction=reduction), *arrays())


def check(results, reduction):
    assert_analysed(results, expected(reduction))


def placed(mesh, x_spec, weight_spec):
    specs = [x_spec, weight_spec, P(*weight_spec[1:2]), P(*x_spec[:2])]
    return in_shards(arrays(), mesh, specs), specs


def exchanged(lines):
    """Of instructions that are collectives: names, and how many elements each array has."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return [
        (name, math.prod(int(n) for n in shape.split(",") if n))
        for line in lines
        for shapes, name in re.findall(rf"= (\(?[^=]*?) ({names})(?:-start)?\(", line)
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]


@pytest.mark.parametrize("reduction", ["mean", "log_prob"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, kind, reduction):
    """Gradients lie as what they are of; the loop moves statistics alone."""
    x_spec, weight_spec, collectives, in_loop = LAYOUTS[layout]
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, x_spec, weight_spec)
    outs = (NamedSharding(mesh, P()), tuple(NamedSharding(mesh, s) for s in specs[:3]))
    jitted = jax.jit(
        functools.partial(step, reduction=reduction),
        out_shardings=outs if kind == "auto" else None,
    )
    compiled = jitted.lower(*sharded).compile()
    results = compiled(*sharded)
    check(results, reduction)
    for gradient, spec in zip(results[1], specs):
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, spec), gradient.ndim)
    text = compiled.as_text()
    found = exchanged(text.splitlines())
    # Results of rows are gathered where x's rows are whole.
    assert {name for name, size in found if (name, size) != ("all-gather", 8 * 12)} == collectives
    shards = math.prod(MESH[name] for name in jax.tree.leaves(tuple(weight_spec)))
    most = D * max(V // shards, 96 // MESH["data"])
    assert all(size <= most for name, size in found if name == "all-reduce")
    computations = dict(_computations(text))
    bodies = re.findall(r"body=%?([\w.\-]+)", text)
    found = exchanged(line for body in bodies for *_, line in computations[body])
    # Statistics of a chunk's four rows.
    assert all(name == "all-reduce" and size <= 4 * 4 for name, size in found), found
    assert bool(found) == in_loop


@pytest.mark.parametrize("reduction", ["none", "log_prob"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_rows(kind, reduction):
    mesh = mesh_of(Case("", MESH, P()), kind)
    layout = LAYOUTS["rows" if kind == "manual" else "rows and V"]
    sharded, specs = placed(mesh, *layout[:2])
    function = functools.partial(loss, reduction=reduction)
    if kind == "manual":
        inner = function

        def function(*shards):
            return jax.lax.psum(inner(*shards), ("data", "model"))

        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    check(jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*sharded), reduction)


@pytest.mark.parametrize("reduction", ["sum", "log_prob"])
@pytest.mark.parametrize("kernels", ["kernel"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows", "rows and V"])
def test_kernels_get_chunks_of_shards(kernels, kind, layout, reduction):
    """But where classes are split: XLA's code sums their statistics over the mesh."""
    mesh = mesh_of(Case("", MESH, P()), kind)
    sharded, specs = placed(mesh, *LAYOUTS[layout][:2])
    function = functools.partial(loss, reduction=reduction)
    if kind == "manual":
        inner, specs = function, [P("data"), P(), P(), P("data")]

        def function(*shards):
            return jax.lax.psum(inner(*shards), "data")

        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*sharded)
    chunks = [] if layout == "rows and V" and kind != "manual" else [(4, V)]
    assert sorted(set(kernels.shapes)) == chunks


def test_a_mean_inside_shard_map():
    """That of the shard's rows; gradients of what is replicated are summed."""
    mesh = mesh_of(Case("", MESH, P()), "auto")
    sharded, specs = placed(mesh, P("data", "model"), P())

    def function(*shards):
        return jax.lax.pmean(loss(*shards, reduction="mean"), ("data", "model"))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=P())

    def whole(x, weight, bias, labels):
        parts = [
            loss(
                x[i : i + 2, j : j + 6],
                weight,
                bias,
                labels[i : i + 2, j : j + 6],
                reduction="mean",
            )
            for i in range(0, 8, 2)
            for j in range(0, 12, 6)
        ]
        return sum(parts) / 8

    ours, theirs = (jax.value_and_grad(f, (0, 1, 2)) for f in (mapped, whole))
    assert_computes(jax.jit(ours)(*sharded), theirs, *arrays())


@pytest.mark.parametrize("reduction", ["mean", "log_prob"])
def test_forward_mode_and_second_order(reduction):
    mesh = mesh_of(Case("", MESH, P()), "explicit")
    sharded, _ = placed(mesh, P("data"), P(None, "model"))

    def derivatives(x, weight, bias, labels):
        def function(x, weight):
            return loss(x, weight, bias, labels, reduction=reduction)

        tangents = (jnp.cos(x), jnp.cos(weight))
        return jax.jvp(jax.grad(function, (0, 1)), (x, weight), tangents)

    assert_computes(jax.jit(derivatives)(*sharded), derivatives, *arrays())
