"""Parameters that broadcast along normalised axes: GroupNorm and InstanceNorm."""

import functools

import jax
import jax.numpy as jnp
import pytest
import refused
from norms import check, normal
from program_error import assert_computes

import jaxnorm
from jaxnorm_kernels.implementation import takes_no_inner

# Maps names of cases to the shape of x, the normalised axes, and the shapes of scale and bias.
CASES = {
    "group norm": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (4, 1, 8)),
    "images": ((2, 5, 8, 4, 8), (1, 2, 4), (4, 1, 1, 8), (4, 1, 1, 8)),
    "one bias of a sample": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (2, 4, 1, 8)),
    "parameters of each sample": ((2, 37, 4, 8), (1, 3), (2, 4, 1, 8), (2, 4, 1, 8)),
    "instance norm": ((2, 5, 8, 32), (1, 2), (32, 1, 1), (32, 1, 1)),
    "channels first": ((2, 4, 8, 3, 5), (2, 3, 4), (4, 8, 1, 1), (4, 8, 1, 1)),
    "unlike each other": ((2, 37, 4, 8), (1, 3), (37, 1), (4, 1, 1)),
    "one number": ((5, 16), -1, (1,), (1, 16)),
}
pytestmark = pytest.mark.usefixtures("quick_to_compile")


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS, refused.NARROW)
@pytest.mark.parametrize(
    ("dtype", "p_dtype", "save", "activation"),
    [
        ("float32", "bfloat16", "input", None),
        ("bfloat16", "float32", "output", None),
        ("float32", "float32", "input", "silu"),
        ("bfloat16", "float32", "input", "gelu"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype, p_dtype, save, activation, implementation):
    shape, axis, *sizes = CASES[case]
    x = normal(shape, dtype, 0, shift=0.5)
    scale, bias = (normal(size, p_dtype, seed, 0.3, 1.0) for seed, size in zip((2, 3), sizes))
    scale = scale.at[..., 0].set(0) if scale.shape[-1] > 1 else scale
    bias = jnp.where(scale == 0, 0, bias) if bias.shape == scale.shape else bias
    given = {"axis": axis, "save": save, "activation": activation, "scale": scale, "bias": bias}
    check("layer_norm", x, implementation=implementation, **given)


X = normal((2, 6, 4, 8), "float32", 0)
SCALE, BIAS = normal((4, 1, 8), "float32", 1), normal((4, 1, 8), "float32", 2)
FUNCTIONS = {
    "layer_norm": lambda norm, x, *p, **given: norm(x, *p, **given),
    "rms_norm": lambda norm, x, s, b, **given: norm(x, s, bias=b, **given),
    "add_layer_norm": lambda norm, x, *p, **given: norm(x, 2 * x, *p, **given),
    "add_rms_norm": lambda norm, x, s, b, **given: norm(x, 2 * x, s, gate=b, **given),
    "rms_norm_add": lambda norm, x, s, b, **given: norm(x, 2 * x, s + b, **given),
    "rms_norm_add_rms_norm": lambda norm, x, s, b, **given: norm(x, x, s, b[:, :, :1], **given),
}


def summed(name, x, *parameters, scale_offset=1.0, **given):
    norm = functools.partial(getattr(jaxnorm, name), axis=(1, 3), scale_offset=scale_offset)
    results = FUNCTIONS[name](norm, x, *parameters, **given)
    weights = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    return sum(jnp.sum(weights * a) for a in jax.tree.leaves(results))


@pytest.mark.parametrize(
    ("name", "save"), [(name, ("output", "input")[i % 2]) for i, name in enumerate(FUNCTIONS)]
)
def test_whole_parameters_give_the_same(name, save):
    """Parameters that broadcast give the same results as expanded parameters.

    This is tested in reverse mode and in forward mode.
    """
    given = {} if name == "rms_norm_add" else {"save": save}

    def whole(x, *parameters):
        return summed(name, x, *(jnp.broadcast_to(p, (4, 6, 8)) for p in parameters), **given)

    function = functools.partial(summed, name, **given)
    primals, tangents = (X, SCALE, BIAS), (jnp.sin(X), BIAS, SCALE)
    ours, theirs = (jax.grad(f, (0, 1, 2)) for f in (function, whole))
    assert_computes(ours(*primals), theirs, *primals, like=ours)
    ours, theirs = (functools.partial(jax.jvp, f) for f in (function, whole))
    assert_computes(ours(primals, tangents), theirs, primals, tangents, like=ours)


def test_errors():
    for shape in [(4, 8), (2, 1, 8), (4, 2, 8), (4, 1, 4)]:
        with pytest.raises(
            ValueError, match=r"scale has shape .*; expected \(6, 8\).*\(or 1, where"
        ):
            jaxnorm.layer_norm(X, jnp.ones(shape), axis=(1, 3))


def test_check_params():
    report = jaxnorm.check_params({"norm": {"scale": SCALE, "bias": BIAS}}, "bfloat16")
    assert report.norms[0].columns == 32


def test_implementations_without_strided_views_refuse_groups(monkeypatch):
    """An implementation without strided kernels refuses groups of rows that are not consecutive.

    Rows of a group use the same parameters. Here, the groups alternate from row to row.
    """
    from jaxnorm_kernels import mosaic

    without = mosaic.IMPLEMENTATION._replace(takes_inner=takes_no_inner)
    monkeypatch.setattr(mosaic, "IMPLEMENTATION", without)
    x, scale = jnp.ones((2, 39, 4, 8)), jnp.ones((4, 1, 8))
    with pytest.raises(ValueError, match="groups of rows that are not consecutive"):
        jaxnorm.layer_norm(x, scale, axis=(1, 3), implementation="mosaic")
