"""auto_remat of the twelve models of the benchmarks: gradients, operations, and the docs' table."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
import reference
from remat_cases import assert_fits, assert_same
from test_models import CONFIGURATIONS, hugging_face

import jaxnorm
from benchmarks.remat_models import language, measure, policies
from benchmarks.remat_models.__main__ import PAGE
from benchmarks.remat_models.measure import CASES
from benchmarks.remat_models.policies import POLICIES

# Models whose plans take less than three seconds.
QUICK = ("GPT-2", "Llama 3.2 1B", "Qwen 3 8B", "Mixtral 8x7B")
# Names of models whose layers can also be unrolled.
UNROLLED = {"GPT-2": "gpt2-small", "Llama 3.2 1B": "llama-1b", "Qwen 3 8B": "llama-1b-qk"}


def unrolled(name, layers, dtype="bfloat16", batch=2, seq=128):
    """Return the program of a small model whose layers are unrolled."""
    sizes = {"width": 64, "hidden": 256, "heads": 4, "kv_heads": 4 if name == "GPT-2" else 1}
    sizes |= {"layers": layers, "vocabulary": 64, "batch": batch, "seq": seq}
    model = language.model(dtype, UNROLLED[name], **sizes)
    return language.of_model(dataclasses.replace(model, layers="unrolled"))


def arguments(program):
    key = jax.random.key(0)
    return jax.jit(program.init)(key), jax.jit(program.batch)(key)


def double(tree):
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: a.astype("float64") if is_float(a) else a, tree)


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(
    ("name", "budget"), [*((name, None) for name in CASES), *((name, 0.3) for name in UNROLLED)]
)
def test_gradients(name, budget):
    """Gradients are as accurate as plain JAX's.

    Without a budget, XLA's program repeats no costly operation.
    """
    program = CASES[name].small_program()
    given = arguments(program)
    compiled = [
        jax.jit(jax.grad(f)).lower(*given).compile()
        for f in (jaxnorm.auto_remat(program.loss, budget=budget), program.loss)
    ]
    ours, theirs = (f(*given) for f in compiled)
    with jax.enable_x64(True):
        exact = CASES[name].small_program("float64")
        expected = jax.jit(jax.grad(exact.loss))(*double(given))
    reference.assert_as_accurate(ours, theirs, expected)
    of_ours, of_theirs = (in_hlo(f.as_text()) for f in compiled)
    assert bool(of_ours - of_theirs) == (budget is not None)


def in_hlo(text):
    """Count the costly operations in a compiled program."""
    kinds = r" (dot|convolution|custom-call|ragged-dot|rng-bit-generator|sort|topk|while)\("
    return collections.Counter(re.findall(kinds, text))


@pytest.mark.parametrize("name", CASES)
def test_no_costly_operation_runs_twice(name):
    assert measure.repeated(CASES[name].small_program()) == {}


@pytest.mark.parametrize("budget", [None, 0.2])
@pytest.mark.parametrize("name", [*QUICK, "Gemma 2 2B", "DiT-XL/2"])
def test_printed_plans(name, budget):
    program = CASES[name].small_program("bfloat16")
    plan = jaxnorm.remat_plan(program.loss, *measure.types(program), budget=budget)
    assert_fits(plan)
    if name == "Llama 3.2 1B" and budget is None:
        _, by_hand = str(plan).split("the same by hand: ")
        lines = re.sub(r" +\w+.py:\d+ +", "", by_hand).splitlines()
        assert {'q = checkpoint_name(q, "q")', 'k = checkpoint_name(k, "k")'} <= {*lines}
        assert "save_only_these_names(" in by_hand


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", ["GPT-2", "Llama 3.2 1B"])
def test_unrolled_layers_need_less_memory(name):
    """XLA neither merges the passes of unrolled layers, nor recomputes all layers at once."""
    program = unrolled(name, 6)  # so that one layer is a small part
    types = measure.types(program)
    plan = jaxnorm.remat_plan(program.loss, *types)

    def temp(f):
        return jax.jit(jax.grad(f)).lower(*types).compile().memory_analysis().temp_size_in_bytes

    auto = functools.partial(jaxnorm.auto_remat, program.loss)
    assert temp(auto()) <= temp(program.loss) - (plan.default - plan.total)
    assert temp(auto(budget=plan.frontier[-1].bytes)) < temp(auto())


@pytest.mark.usefixtures("quick_to_compile")
def test_a_single_layer_need_not_save_anything():
    program = unrolled("Llama 3.2 1B", 1, "float32", batch=1, seq=4)
    given = arguments(program)
    assert jaxnorm.remat_plan(program.loss, *given).frontier[-1].bytes == 0
    ours = jax.jit(jax.grad(jaxnorm.auto_remat(program.loss, budget=0)))
    assert_same(lambda: ours(*given), lambda: jax.grad(program.loss)(*given))


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.models) for n in CASES]
)
def test_the_committed_table(name):
    assert measure.line(name) in PAGE.read_text(), "run python -m benchmarks.remat_models --write"


@pytest.mark.parametrize(
    "policy", [p if p == "names" else pytest.param(p, marks=pytest.mark.models) for p in POLICIES]
)
def test_the_committed_policies(policy):
    assert policies.line(policy) in PAGE.read_text(), (
        "run python -m benchmarks.remat_models --write"
    )


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *((name, case.of_layers) for name, case in CASES.items() if case.goal is not None),
        *((name, functools.partial(unrolled, name)) for name in UNROLLED),
    ],
)
def test_saved_activations(name, build):
    """A layer saves no more than an expert would choose by hand."""
    activations, matrices = measure.per_layer(build, jaxnorm.auto_remat)
    assert activations <= CASES[name].goal
    assert matrices <= measure.MATRICES


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")  # Old packages cause warnings.
@pytest.mark.parametrize("name", [*CONFIGURATIONS])
def test_hugging_face(name):
    """The models are unchanged: layers are unrolled, and attention is in plain JAX."""
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, 64)

    def gradient(dtype, remat):
        model = hugging_face(name, dtype)

        def loss(params):
            return jnp.sum(jnp.sin(model(tokens, params=params).last_hidden_state))

        return remat(loss), jax.jit(jax.grad(remat(loss))), model.params

    ours, of_ours, params = gradient("float32", jaxnorm.auto_remat)
    plain, of_plain, _ = gradient("float32", lambda f: f)
    with jax.enable_x64(True):
        expected = gradient("float64", lambda f: f)[1](double(params))
    reference.assert_as_accurate(of_ours(params), of_plain(params), expected)
    assert not measure.operations(of_ours, params) - measure.operations(of_plain, params)
    sizes = [jaxnorm.memory_report(f, params).total for f in (ours, plain)]
    assert sizes[0] < sizes[1] / 2
