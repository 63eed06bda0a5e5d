"""fit_memory: training steps that are compiled into a given memory."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from program_error import assert_same_results

import jaxnorm
from jaxnorm import auto_remat, fit_memory

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.remat,
    pytest.mark.usefixtures("quick_to_compile"),
]

LAYERS, ROWS, COLS = 4, 1024, 32
_KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHTS = {
    "gate": jax.random.normal(_KEYS[0], (LAYERS, COLS, 2 * COLS)) / 8,
    "down": jax.random.normal(_KEYS[1], (LAYERS, 2 * COLS, COLS)) / 8,
}
X = jax.random.normal(_KEYS[2], (ROWS, COLS))
SHAPES = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WEIGHTS, X))


def layer(x, w):
    y = jnp.tanh(jnp.sin(x) * jnp.cos(x))
    return x + jax.nn.silu(y @ w["gate"]) @ w["down"]


def loss(weights, x, layer=layer):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)


def unrolled(weights, x, layer=layer):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w: w[i], weights))  # noqa: B023, called here
    return jnp.mean(x**2)


def step(remat, weights, x, loss=loss):
    gradients = jax.grad(remat(loss))(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def step_of_layers(remat, weights, x):
    gradients = jax.grad(functools.partial(loss, layer=remat(layer)))(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


STEPS = {
    "loss": step,
    "layers": step_of_layers,
    "unrolled": functools.partial(step, loss=unrolled),
}


def compiled(step, remat, donate_argnums=()):
    jitted = jax.jit(functools.partial(step, remat), donate_argnums=donate_argnums)
    return jitted.lower(WEIGHTS, X).compile()


def memory(program):
    plan = program.memory_analysis()
    arrays = plan.argument_size_in_bytes + plan.output_size_in_bytes
    return arrays + plan.temp_size_in_bytes - plan.alias_size_in_bytes


def plain(fun):
    return fun


@pytest.fixture
def compilations(monkeypatch):
    """A list of all compiled programs."""
    programs = []
    compile_ = jax.stages.Lowered.compile

    def counted(self, *args, **kwargs):
        programs.append(compile_(self, *args, **kwargs))
        return programs[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return programs


def assert_trains(program, step=step):
    """Assert that a compiled step computes what the plain step does."""
    assert_same_results(
        lambda: program(WEIGHTS, X), lambda: step(plain, WEIGHTS, X), as_accurate=True
    )


def matmuls(program):
    return program.as_text().count(" dot(")


@pytest.mark.parametrize("name", STEPS)
def test_limits(name, compilations):
    """The smaller the limit, the more runs again. Without need, nothing does."""
    step = STEPS[name]
    without, auto = memory(compiled(step, plain)), memory(compiled(step, auto_remat))
    assert auto < without
    for limit, most in ((without, 1), (auto, 5), ((2 * auto + without) // 3, 5)):
        compilations.clear()
        program = fit_memory(step, *SHAPES, limit=limit)
        assert memory(program) <= limit
        assert len(compilations) <= most
        # Compared with what it compiled, it returns the program closest to the plain one.
        assert memory(program) == max(m for m in map(memory, compilations) if m <= limit)
        assert_trains(program)
    assert matmuls(program) == matmuls(compiled(step, plain))


@pytest.mark.parametrize("name", STEPS)
def test_an_impossible_limit(name, compilations):
    """The error states the least memory that was reached, into which the step then fits."""
    step = STEPS[name]
    with pytest.raises(ValueError, match=r"^jaxnorm.fit_memory: limit=1000 bytes; the least") as e:
        fit_memory(step, WEIGHTS, X, limit=1000)
    assert len(compilations) <= 5
    reached = min(map(memory, compilations))
    assert f"is {reached} bytes" in str(e.value)
    assert reached < memory(compiled(step, auto_remat))
    compilations.clear()
    program = fit_memory(step, WEIGHTS, X, limit=reached)
    assert memory(program) == reached
    assert len(compilations) <= 5
    assert matmuls(program) > matmuls(compiled(step, plain))
    assert_trains(program)


def test_donated_arguments(compilations):
    """The updated weights reuse the memory of donated weights, which the limit includes."""
    size = sum(a.nbytes for a in jax.tree.leaves(WEIGHTS))
    limit = memory(compiled(step, plain, donate_argnums=0))
    assert limit < memory(compiled(step, plain))
    compilations.clear()
    program = fit_memory(step, WEIGHTS, X, limit=limit, donate_argnums=0)
    assert len(compilations) == 1
    assert "jit_step" in program.as_text()  # profiles show the name of the step
    assert program.memory_analysis().alias_size_in_bytes == size
    donated = jax.tree.map(jnp.copy, WEIGHTS)
    results = program(donated, X)
    assert all(a.is_deleted() for a in jax.tree.leaves(donated))
    assert_same_results(lambda: results, lambda: step(plain, WEIGHTS, X), as_accurate=True)


def test_several_functions():
    """All wrapped functions share the memory, even if one of them never runs again."""

    def two(remat, weights, x):
        of_layers = functools.partial(loss, layer=remat(layer))
        with_head = remat(lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w["gate"][0])) ** 2))
        gradients = jax.grad(lambda w: of_layers(w, x) + with_head(w, x))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    limit = memory(compiled(two, auto_remat))
    program = fit_memory(two, WEIGHTS, X, limit=limit)
    assert memory(program) <= limit
    assert_trains(program, two)


def test_two_programs_predict_the_memory_of_the_others(monkeypatch):
    """If memory is a linear function of the saved bytes, the best of all choices is found."""
    search = sys.modules["jaxnorm.remat.fit_memory"]._Search

    def compiled(self, remat):
        size = jaxnorm.memory_report(remat(unrolled), *self._args).total
        self._memories.append(2 * size)
        return size, 2 * size  # The size stands for the program.

    monkeypatch.setattr(search, "_compiled", compiled)
    points = jaxnorm.remat_plan(unrolled, WEIGHTS, X).frontier
    assert len(points) > 2**4  # A search that halves would not find them.
    for point in points[2 :: len(points) // 3]:
        found = fit_memory(STEPS["unrolled"], WEIGHTS, X, limit=2 * point.bytes + 1)
        assert found == point.bytes


def test_compilers_that_refuse_programs(monkeypatch):
    """A program that does not fit into the device may fail to compile. Others are tried."""
    limit = memory(compiled(step, auto_remat))
    compile_ = jax.stages.Lowered.compile

    def refusing(self):
        program = compile_(self)
        if memory(program) > limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: ran out of memory")
        return program

    monkeypatch.setattr(jax.stages.Lowered, "compile", refusing)
    assert memory(fit_memory(step, WEIGHTS, X, limit=limit)) <= limit

    def failing(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: another failure")

    monkeypatch.setattr(jax.stages.Lowered, "compile", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another failure"):
        fit_memory(step, WEIGHTS, X, limit=limit)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (lambda remat, w, x: jax.grad(loss)(w, x), {}, "step does not call .* remat"),
        # No choice of saved arrays makes a step smaller that differentiates nothing.
        (
            lambda remat, w, x: remat(loss)(w, x),
            {"limit": 1},
            r"limit=1 .* that 2 compil.* is \d+ ",
        ),
        (1, {}, "step is a int; expected"),
        (step, {"donate_argnums": 2}, "donate_argnums=2 has 2"),
        *(
            (step, {"limit": limit}, "limit=")
            for limit in (True, "1", None, 1j, 0, -1, float("nan"))
        ),
    ],
)
def test_errors(step, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^jaxnorm.fit_memory: {message}"):
        fit_memory(step, WEIGHTS, X, **{"limit": 2**30, **options})
