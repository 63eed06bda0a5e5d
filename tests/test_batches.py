"""`jax.vmap` of every function over each operand equals a loop, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import FUNCTIONS, SHAPES, Sizes, floats_in, gradients, operands_of, scalar
from program_error import analyse, assert_analysed, assert_computes, values_of
from programs import equations, kernels_in

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SIZE = 2
OF_ROWS = {kind for kind in SHAPES if len(SHAPES[kind](Sizes())) == 3} - {"cos", "sin"}


def layouts(kinds):
    """Yield tuples that have, for each operand, the index of its batch axis or None.

    None means that the operand has no batch axis. In some tuples only one operand has a batch axis,
    in one tuple all operands have it, and in the others several have it.
    """
    for i, kind in enumerate(kinds):
        axis = (i + 1) % (len(SHAPES[kind](Sizes())) + 1)
        yield tuple(axis if j == i else None for j in range(len(kinds)))
    yield tuple(0 if kind in {*OF_ROWS, "labels", "counts"} else None for kind in kinds)
    yield (0,) * len(kinds)
    yield (None, *[0] * (len(kinds) - 1))


# Each function is tested with a batch axis in a single operand, once for each operand. It is also
# tested with half of the combinations in which several operands have a batch axis. The last entry
# of a case is True if its program is compiled. Otherwise, the program is traced, and its equations
# are evaluated in float64. This shows errors in the rules of batching equally well.
CASES = [
    pytest.param(name, dims, (n + i) % 3 == 0, id=f"{name}-{','.join(map(str, dims))}")
    for n, (name, function) in enumerate(FUNCTIONS.items())
    for i, dims in enumerate(dict.fromkeys(layouts(function.kinds.split())))
    if any(d is not None for d in dims) and (i < len(dims) or (n + i) % 2)
]


def batched(array, dim):
    """Return an array with a new axis `dim`, along which `SIZE` variants of `array` are stacked.

    The variants are multiples of a float array, or rotations of an array of another dtype. If `dim`
    is None, return `array` itself.
    """
    if dim is None:
        return array
    each = [
        (1 + i / 8) * array if jnp.issubdtype(array.dtype, jnp.floating) else np.roll(array, i, 0)
        for i in range(SIZE)
    ]
    return jnp.stack([a.astype(array.dtype) for a in each], dim)


@pytest.mark.parametrize(("name", "dims", "compiled"), CASES)
def test_a_batch_is_a_loop(name, dims, compiled):
    """A batch equals a loop, whether the gradient is taken inside or outside of `jax.vmap`."""
    function = FUNCTIONS[name].ours
    one = operands_of(name)
    operands = [*map(batched, one, dims)]
    wrt = floats_in(one)
    inside = gradients(function, wrt)

    def run(*operands):
        def total(*operands):
            return jnp.sum(jax.vmap(scalar(function), dims)(*operands))

        both = jax.vmap(lambda *a: (function(*a), inside(*a)), dims)(*operands)
        return both, jax.grad(total, wrt)(*operands)

    def loop(*operands):
        parts = [
            [a if d is None else jnp.take(a, i, d) for a, d in zip(operands, dims)]
            for i in range(SIZE)
        ]
        both = [(function(*part), inside(*part)) for part in parts]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
        outside = [
            g.sum(0) if dims[i] is None else jnp.moveaxis(g, 0, dims[i])
            for i, g in zip(wrt, stacked[1], strict=True)
        ]
        return stacked, tuple(outside)

    if compiled or jax.default_backend() != "cpu":
        assert_computes(jax.jit(run)(*operands), loop, *operands)
    else:
        analysed = analyse(run, *operands)
        assert_analysed(values_of(analysed), analyse(loop, *operands), analysed)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm"])
def test_a_batch_of_scales_reads_x_once(name):
    """If only scales are mapped, plain JAX computes the forward pass, without copies of x.

    The backward pass has a saved output for each scale, so its arrays are mapped, too.
    """
    x, scales = jnp.ones((4096, 1024)), jnp.ones((3, 1024))
    options = {"bias": jnp.ones(1024)} if name == "layer_norm" else {}
    residual = [x] if name == "add_rms_norm" else []

    def run(x, scale, **given):
        return getattr(jaxnorm, name)(x, *residual, scale, **options, **given)

    def mapped(x, scales, **given):
        return jax.vmap(lambda scale: run(x, scale, **given))(scales)

    def both(x, scales):
        results, vjp = jax.vjp(mapped, x, scales)
        return results, vjp(results)

    assert kernels_in(run, x, scales[0]) == 1
    assert kernels_in(mapped, x, scales) == 0
    assert kernels_in(functools.partial(mapped, implementation="mosaic"), x, scales) == 1
    assert kernels_in(jax.vmap(mapped, (0, None)), jnp.stack([x, x]), scales) == 0
    assert kernels_in(jax.vmap(run), jnp.stack([x, x, x]), scales) == 1
    assert kernels_in(both, x, scales) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_depends_on_no_batched_array_is_computed_once(name):
    """Results and gradients have no batch axis if none of their operands has one.

    This holds inside of `jax.vmap`, and if only tangents have a batch axis, as in `jax.hessian`. If
    a result had a batch axis, ``out_axes=None`` would raise an error.
    """
    function, operands = FUNCTIONS[name].ours, operands_of(name)
    wrt = floats_in(operands)
    floats = tuple(operands[i] for i in wrt)

    def both(*floats):
        whole = [*operands]
        for i, a in zip(wrt, floats, strict=True):
            whole[i] = a
        return function(*whole), gradients(function, wrt)(*whole)

    def inside(b):
        return both(*floats), b

    def of_tangents(b):
        return jax.jvp(both, floats, jax.tree.map(lambda a: b * a, floats))

    size = 61  # It occurs in the shape of no other array.
    batch = jnp.ones(size)
    traced = jax.make_jaxpr(jax.vmap(inside, out_axes=(None, 0)))(batch)
    shapes = {v.aval.shape for e in equations(traced) for v in e.outvars}
    assert not [shape for shape in shapes if size in shape]
    one = jax.eval_shape(of_tangents, jnp.ones(()))
    results = jax.eval_shape(jax.vmap(of_tangents, out_axes=(None, 0)), batch)
    assert jax.tree.map(lambda a: a.shape, results[0]) == jax.tree.map(lambda a: a.shape, one[0])


@pytest.mark.parametrize(
    "name", ["add_rms_norm", "add_layer_norm", "rms_norm_add_rms_norm", "add_rms_norm with a gate"]
)
def test_the_sum_of_norms_with_a_batch_of_scales_is_computed_once(name):
    """If only the scale of the result is batched, the sum h and its tangent have no batch axis."""
    function, operands = FUNCTIONS[name].ours, operands_of(name)
    kinds = FUNCTIONS[name].kinds.split()
    at = len(kinds) - 1 - kinds[::-1].index("scale")
    dims = tuple(0 if i == at else None for i in range(len(operands)))

    def both(*operands):
        (y, h), (dy, dh) = jax.jvp(function, operands, jax.tree.map(jnp.cos, operands))
        return (y, dy), (h, dh)

    def batch(*operands):
        return jax.vmap(both, dims, ((0, 0), (None, None)))(*operands)

    def loop(*operands):
        each = [both(*operands[:at], scale, *operands[at + 1 :]) for scale in operands[at]]
        return jax.tree.map(lambda *a: jnp.stack(a), *[y for y, _ in each]), each[0][1]

    whole = [batched(a, dim) for a, dim in zip(operands, dims)]
    assert_computes(jax.jit(batch)(*whole), loop, *whole)
