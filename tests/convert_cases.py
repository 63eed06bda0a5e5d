"""Helpers for tests of modules and of converted models: the libraries, bounds and log messages."""

import contextlib
import functools
import logging
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

WIDTH = 16


def normal(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# ------------------------------------------------------------------------------------ the libraries


class Linen:
    """Norms and their conversion in linen. The other libraries have classes with these methods."""

    name, package, ours, theirs, module = "linen", "Flax", jaxnorm.linen, nn, nn.Module
    function = "linen.converted"

    def make(self, kind, width=WIDTH, **fields):
        """Return a norm of this class. Names of fields are Flax's."""
        del width
        return functools.partial(kind, **fields)

    def model(self, norms):
        """Return a model that calls each norm of a dict on the same x."""
        return Norms(tuple(norms.items()))

    def functional(self, norm, options=None, x=None):
        """Return a norm's parameters, and a function of them and x.

        If `options` is not None, the norm is converted with these options. x is an example.
        """
        module, x = norm(), jnp.ones((2, WIDTH)) if x is None else x
        key = jax.random.key(1)
        variables = mapped(module, lambda x: module.init(key, x))(x)

        def run(parameters, x, **call):
            def apply(parameters, x):
                return module.apply({"params": parameters}, x, **call)

            with self.context(options):
                return mapped(module, apply)(parameters, x)

        return variables.get("params", {}), run

    def context(self, options):
        is_plain = options is None
        return contextlib.nullcontext() if is_plain else jaxnorm.linen.converted(**options)

    def saves(self, model, **options):
        """Convert a model; return the modes of the norms that run jaxnorm's functions."""
        variables, x = model.init(jax.random.key(0), jnp.ones((4, WIDTH))), jnp.ones((4, WIDTH))
        with jaxnorm.linen.converted(**options):
            program = str(jax.make_jaxpr(lambda x: model.apply(variables, x))(x))
        return re.findall(r"save=(\w+)", program)


def mapped(norm, function):
    """Return `function`, under `jax.vmap` if the norm has an `axis_name`."""
    return function if norm.axis_name is None else jax.vmap(function, axis_name=norm.axis_name)


class Norms(nn.Module):
    norms: Any

    @nn.compact
    def __call__(self, x):
        return [make(name=name)(x) for name, make in self.norms]


class Nnx(Linen):
    name, package, ours, theirs, module = "nnx", "Flax", jaxnorm.nnx, nnx, nnx.Module
    function = "nnx.convert"

    def make(self, kind, width=WIDTH, **fields):
        return kind(width, **fields, rngs=nnx.Rngs(1))

    def model(self, norms):
        return nnx.Dict(**norms)

    def functional(self, norm, options=None, x=None):
        graph, state = nnx.split(norm if options is None else jaxnorm.nnx.convert(norm, **options))

        def run(parameters, x, **call):
            with_values = jax.tree.map(lambda a: a, state)
            nnx.replace_by_pure_dict(with_values, parameters)
            return mapped(norm, lambda x: nnx.merge(graph, with_values)(x, **call))(x)

        return nnx.to_pure_dict(state), run

    def saves(self, model, **options):
        norms = self.ours.convert(model, **options)
        return [norm.save for norm in norms.values() if hasattr(norm, "save")]


class Equinox(Nnx):
    name, package, ours, theirs, module = "equinox", "equinox", jaxnorm.equinox, eqx.nn, eqx.Module
    function = "equinox.convert"

    def make(self, kind, width=WIDTH, **fields):
        names = {"epsilon": "eps", "param_dtype": "dtype", "use_scale": "use_weight"}
        inits = {n: fields.pop(f"{n}_init") for n in ("scale", "bias") if f"{n}_init" in fields}
        norm = kind(width, **{names.get(name, name): value for name, value in fields.items()})
        for name, init in inits.items():
            field = "weight" if name == "scale" else "bias"
            value = getattr(norm, field)
            if value is not None:
                value = init(jax.random.key(1), value.shape, value.dtype)
                norm = eqx.tree_at(lambda norm, f=field: getattr(norm, f), norm, value)
        return norm

    def model(self, norms):
        return norms

    def functional(self, norm, options=None, x=None):
        norm = norm if options is None else jaxnorm.equinox.convert(norm, **options)
        fields = {"scale": "weight", "bias": "bias"}
        held = {n: f for n, f in fields.items() if getattr(norm, f) is not None}

        def run(parameters, x):
            values = [parameters[name] for name in held]
            of = eqx.tree_at(lambda n: [getattr(n, f) for f in held.values()], norm, values)
            for _ in x.shape[1:]:
                of = jax.vmap(of)
            return of(x)

        return {name: getattr(norm, field) for name, field in held.items()}, run


LIBRARIES = {library.name: library for library in (Linen(), Nnx(), Equinox())}
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=list(LIBRARIES))


def lost_scale(key, shape, dtype):
    """Return scales of which those in columns 1 and 3 are 0 and 1e-9.

    In these columns, x cannot be recovered from the norm's output y.
    """
    del key
    return jnp.ones(shape, dtype).at[..., 1].set(0).at[..., 3].set(1e-9)


LOST = {"scale_init": lost_scale, "bias_init": nn.initializers.constant(0.3)}

# The text in the log about norms that save their input.
KEPT = 'norms keep their input, as with save="input": '


# -------------------------------------------------------------------------------------- assertions


def assert_same(ours, theirs):
    """Assert that two trees have equal structures, and arrays of equal values and dtypes."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def in_double(function, *arguments):
    """Return the results of a function for arguments in float64."""

    def double(a):
        is_float = jnp.issubdtype(a.dtype, jnp.floating)
        return jnp.asarray(np.asarray(a, "float64")) if is_float else a

    with jax.enable_x64(True):
        return function(*jax.tree.map(double, arguments))


def message_of(caplog):
    """Return the message of the only record in the log, a warning of jaxnorm."""
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxnorm", logging.WARNING)
    return record.getMessage()


# The arguments, and their defaults, that jaxnorm's modules have in addition to another package's.
EXTRA = {"save": "output", "implementation": None, "scale_offset": 0.0}
