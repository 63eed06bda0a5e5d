"""Helpers for tests of converted models: error bounds of norms, counts of kernels, log messages."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

each_norm = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def kernels_in(function, *arguments):
    """Return the number of Mosaic kernels in the function's program for CUDA."""
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")


def assert_norm_within_bounds(name, epsilon, x, d, parameters, y, dx, dparameters, saved="output"):
    """Assert that a norm's values and gradients are within the bounds of the float64 reference."""
    expected = reference.Norm(
        *(reference.exact(a) for a in (x, parameters["scale"])),
        reference.exact(parameters.get("bias", jnp.zeros(x.shape[-1]))),
        reference.exact(d),
        subtract_mean=name == "LayerNorm",
        epsilon=epsilon,
        saved=saved,
        x_dtype="float32",
        y_dtype="float32",
    )
    of_dx, of_dscale, of_dbias = expected.gradient_bounds()
    reference.assert_within(y, expected.y, expected.y_bound())
    reference.assert_within(dx, expected.dx, of_dx)
    reference.assert_within(dparameters["scale"], expected.dscale, of_dscale)
    if "bias" in parameters:
        reference.assert_within(dparameters["bias"], expected.dbias, of_dbias)


def with_lost_columns(parameters):
    """Return a norm's parameters with scales of 0 and 1e-9 in columns 1 and 3.

    In these columns, x cannot be recovered from the norm's output y.
    """
    scale = parameters["scale"].at[..., 1].set(0).at[..., 3].set(1e-9)
    return parameters | {"scale": scale, "bias": jnp.full_like(scale, 0.3)}


def assert_left_to_flax(caplog, counted, norms):
    """Assert that one warning names the norms that are not converted, each with its reason."""
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxnorm", logging.WARNING)
    line = record.getMessage()
    assert line.startswith(f"{counted} norms are left to Flax: ")
    for norm in norms:
        assert norm in line
