"""Conversion of linen models by `linen.converted`: contexts, traces and parameters."""

import functools
import gc
import re
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import KEPT, LOST, message_of, normal
from test_convert import LinenModel

import jaxnorm.linen

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def saves(function, *arguments):
    """Return the ``save`` options of a function's norms, in program order."""
    return re.findall(r"save=(\w+)", str(jax.make_jaxpr(function)(*arguments)))


def test_compiled_functions_are_traced_for_inside_and_for_outside():
    model, x = nn.RMSNorm(), normal((4, 16))
    variables = model.init(jax.random.key(0), x)
    apply = jax.jit(model.apply)

    def is_converted():
        return "jaxnorm.rms_norm" in apply.lower(variables, x).as_text(debug_info=True)

    apply(variables, x)
    assert not is_converted()
    with jaxnorm.linen.converted():
        apply(variables, x)
        assert is_converted()
    assert not is_converted()


def test_of_nested_contexts_the_innermost_counts():
    model, x = nn.RMSNorm(use_scale=False), normal((4, 16))
    apply = functools.partial(model.apply, {})
    with jaxnorm.linen.converted(save="input"):
        with jaxnorm.linen.converted(save="output"):
            assert saves(apply, x) == ["output"]
        assert saves(apply, x) == ["input"]


def test_intermediates_are_those_of_flax():
    model, x = nn.Sequential([nn.RMSNorm(), nn.LayerNorm()]), normal((3, 5, 16))
    apply = functools.partial(model.init_with_output, jax.random.key(0), x)
    theirs = apply(capture_intermediates=True)
    with jaxnorm.linen.converted():
        ours = apply(capture_intermediates=True)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.mark.parametrize(
    ("fields", "mask", "reason"),
    [
        ({"axis_name": "batch"}, None, "axis_name='batch'"),
        ({"force_float32_reductions": False}, None, "force_float32_reductions=False"),
        ({}, True, "a mask"),
    ],
)
def test_calls_that_are_left(fields, mask, reason, caplog):
    def init(x):
        return nn.LayerNorm(**fields).init_with_output(jax.random.key(0), x, mask=mask)

    with jaxnorm.linen.converted():
        program = jax.make_jaxpr(jax.vmap(init, axis_name="batch"))(normal((4, 16)))
    assert "jaxnorm" not in str(program)
    assert f"the module itself ({reason})" in message_of(caplog)


class TwoNorms(nn.Module):
    lost: bool = False

    @nn.compact
    def __call__(self, x):
        first = nn.LayerNorm(name="first", **(LOST if self.lost else {}))
        return nn.LayerNorm(name="second")(first(x))


REASON = "(scales of 0, or far below the bias, in 2 of 16 columns)"


def test_norms_whose_output_lacks_columns_keep_their_input(caplog):
    """Outside of `jax.jit`, a norm saves its input if x cannot be recovered from its output.

    This also holds under jax.grad, and for parameters that the model closes over. In all these
    cases, the values of the parameters are known.
    """
    model, x = TwoNorms(lost=True), normal((6, 16))
    variables = model.init(jax.random.key(0), x)

    with jaxnorm.linen.converted():
        ours = jax.grad(lambda v: jnp.sum(jnp.sin(model.apply(v, x))))(variables)
    assert message_of(caplog) == f"jaxnorm.linen.converted: 1 of 2 {KEPT}first {REASON}"
    assert ours["params"]["first"]["scale"][1] != 0
    with jaxnorm.linen.converted():
        assert saves(functools.partial(model.apply, variables), x) == ["input", "output"]
        assert saves(lambda v, x: model.apply(v, x), variables, x) == ["output"] * 2


@pytest.mark.parametrize("given", ["variables", "params", "boxed"])
def test_of_parameters_that_are_traced_others_are_looked_at(given, caplog):
    """The argument `params=` tells `converted` the values of the parameters.

    `converted` needs the values to decide which norms must save their input. In scanned or compiled
    layers, the model's own parameters are tracers, which have no values.
    """
    model, x = LinenModel(), normal((3, 5, 16))
    variables = model.init(jax.random.key(0), x)
    norm = variables["params"]["layers"]["LayerNorm_0"]
    norm |= {n: LOST[f"{n}_init"](None, a.shape, a.dtype) for n, a in norm.items()}
    params = variables if given == "variables" else variables["params"]
    if given == "boxed":
        params = jax.tree.map(lambda a: nn.Partitioned(a, (None,) * a.ndim), params)
    apply = jax.jit(model.apply)

    def programs():
        return re.findall(r"save=(\w+)", str(apply.trace(variables, x).jaxpr))

    with jaxnorm.linen.converted(params=params):
        assert programs() == ["input", "output", "output", "output"]
    of_two = REASON.replace("2 of 16", "4 of 32")
    message = f"jaxnorm.linen.converted: 1 of 4 {KEPT}layers/LayerNorm_0 {of_two}"
    assert message_of(caplog) == message
    # JAX traces the model again only if the set of norms that save their input has changed.
    with jaxnorm.linen.converted():
        assert programs() == ["output"] * 4
    with jaxnorm.linen.converted(params=jax.tree.map(jnp.copy, params)):
        assert programs() == ["input", "output", "output", "output"]
    assert len(caplog.records) == 1


def test_norms_that_params_lack_are_named(caplog):
    model, x = TwoNorms(), normal((6, 16))
    variables = model.init(jax.random.key(0), x)
    other = {"scale": jnp.ones(16), "bias": jnp.ones(3)}  # These are no norm's parameters.
    params = {"first": variables["params"]["first"], "other": other}
    with jaxnorm.linen.converted(params=params):
        jax.eval_shape(model.apply, variables, x)
    assert message_of(caplog) == (
        "jaxnorm.linen.converted: 1 of 2 norms were not looked at: second (params has no such norm)"
    )


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("w", nn.initializers.ones, (x.shape[-1],))


def multiplied(norm, x, factor=2.0):
    return factor * x


class Multiplier:
    def __call__(self, norm, x):
        return 2.0 * x

    def method(self, norm, x):
        return 2.0 * x


@pytest.mark.parametrize("kind", ["closure", "lambda", "partial", "method", "object"])
def test_functions_of_calls_that_are_made_in_each_step(kind):
    """Functions with the same code and data are one function: `jax.jit` traces only once.

    The functions are not kept in memory either.
    """
    x, traced, made, multiplier = normal((6, 16)), [], [], Multiplier()
    variables = Scale().init(jax.random.key(0), x)

    @jax.jit
    def apply(variables, x):
        traced.append(1)
        return Scale().apply(variables, x)

    def step(factor):
        function = {
            "closure": lambda norm, x: factor * x,
            "lambda": lambda norm, x: 2.0 * x,
            "partial": functools.partial(multiplied, factor=factor),
            "method": multiplier.method,
            "object": multiplier,
        }[kind]
        made.append(weakref.ref(function))
        with jaxnorm.linen.converted(calls={Scale: function}):
            return apply(variables, x)

    for _ in range(4):
        np.testing.assert_array_equal(step(2.0), 2 * x)
    gc.collect()
    assert len(traced) == 1
    assert len({id(one()) for one in made} - {id(None)}) <= 1
    if kind in ("closure", "partial"):
        np.testing.assert_array_equal(step(3.0), 3 * x)
