"""Helpers for tests of converted models: error bounds of norms, and log messages."""

import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

each_norm = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])


def normal(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_same(ours, theirs):
    """Assert that two trees have equal structures, and arrays of equal values and dtypes."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def message_of(caplog):
    """Return the message of the only record in the log, a warning of jaxnorm."""
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxnorm", logging.WARNING)
    return record.getMessage()


def assert_norm_within_bounds(name, epsilon, x, d, parameters, y, dx, dparameters, saved="output"):
    """Assert that a norm's values and gradients are within the bounds of the float64 reference."""
    width = x.shape[-1]
    expected = reference.Norm(
        *(reference.exact(x), reference.exact(parameters.get("scale", jnp.ones(width)))),
        reference.exact(parameters.get("bias", jnp.zeros(width))),
        reference.exact(d),
        subtract_mean=name == "LayerNorm",
        epsilon=epsilon,
        saved=saved,
        x_dtype=x.dtype.name,
        y_dtype=y.dtype.name,
    )
    of_dx, of_dscale, of_dbias = expected.gradient_bounds()
    reference.assert_within(y, expected.y, expected.y_bound())
    reference.assert_within(dx, expected.dx, of_dx)
    of_parameters = {"scale": (expected.dscale, of_dscale), "bias": (expected.dbias, of_dbias)}
    for parameter in parameters:
        (wanted, bound), got = of_parameters[parameter], dparameters[parameter]
        if got.dtype != "float32":
            bound = bound + reference.rounding(wanted, got.dtype.name)
        reference.assert_within(got, wanted, bound)


def arguments(module):
    """Return the kinds and defaults of the arguments of a module's constructor."""
    signature = inspect.signature(module.__init__)
    return {p.name: (p.kind, p.default) for p in signature.parameters.values()}


# The arguments, and their defaults, that jaxnorm's modules have in addition to another package's.
EXTRA = {"save": "output", "implementation": None, "scale_offset": 0.0}


def assert_arguments_and_three_more(ours, theirs):
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert arguments(ours) == arguments(theirs) | {n: (keyword, v) for n, v in EXTRA.items()}
    assert issubclass(ours, theirs)


def with_lost_columns(parameters):
    """Return a norm's parameters with scales of 0 and 1e-9 in columns 1 and 3.

    In these columns, x cannot be recovered from the norm's output y.
    """
    scale = parameters["scale"].at[..., 1].set(0).at[..., 3].set(1e-9)
    return parameters | {"scale": scale, "bias": jnp.full_like(scale, 0.3)}


def assert_left_to_flax(caplog, counted, norms):
    """Assert that one warning names the norms that are not converted, each with its reason."""
    line = message_of(caplog)
    assert line.startswith(f"{counted} norms are left to Flax: ")
    for norm in norms:
        assert norm in line
