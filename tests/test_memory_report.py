"""memory_report: its total is JAX's, its lines are the user's, its line on auto_remat is exact."""

import functools
import importlib
import re
from pathlib import Path

import equinox
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advice_cases import told
from jax._src.ad_checkpoint import saved_residuals

import jaxnorm
from jaxnorm import memory_report
from jaxnorm.tools import kept_arrays

pytestmark = pytest.mark.oldest_jax

LAYERS, TOKENS, WIDTH, INNER = 3, 64, 32, 128
SHAPES = {
    "scale": (WIDTH,),
    "gate": (WIDTH, INNER),
    "up": (WIDTH, INNER),
    "bias": (INNER,),
    "down": (INNER, WIDTH),
}
X = jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16")


def weights(layers=LAYERS, dtype="bfloat16"):
    return {n: jax.ShapeDtypeStruct((layers, *shape), dtype) for n, shape in SHAPES.items()}


def norm(x, scale):
    """Compute RMSNorm as Flax does."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def gated(gate, up, weight):
    return (jax.nn.silu(gate) * up) @ weight


def block(x, w, *, norm=norm, mlp=gated):
    y = norm(x, w["scale"])
    return x + mlp(y @ w["gate"], y @ w["up"], w["down"])


def scan(block, w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0].astype(jnp.float32))


def unrolled(block, w, x):
    for i in range(LAYERS):
        x = block(x, {name: a[i] for name, a in w.items()})
    return jnp.sum(x.astype(jnp.float32))


def report_of(block, stack=scan):
    return memory_report(functools.partial(stack, block), weights(), X)


def gpt2(x, w, *, activation=jax.nn.gelu):
    return x + activation(x @ w["up"] + w["bias"]) @ w["down"]


def attention(x, w):
    """Self-attention whose heads are split and joined by reshapes, with float32 probabilities."""
    q, k = ((x @ w[name]).reshape(TOKENS, 8, -1) for name in ("gate", "up"))
    logits = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(logits).astype(x.dtype)
    return x + jnp.einsum("hqk,khd->qhd", p, k).reshape(TOKENS, -1) @ w["down"]


def of_jax(f, *args):
    """Return the bytes of the arrays that `jax.ad_checkpoint.print_saved_residuals` lists.

    Arguments of `f` and constants are not counted.
    """
    arrays = [a for a, why in saved_residuals(f, *args) if not re.search("argument|constant", why)]
    return sum(a.size * a.dtype.itemsize for a in arrays)


POLICY = functools.partial(jax.checkpoint, policy=jaxnorm.save_policy)
DOTS = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
BLOCKS = {
    "llama": block,
    "jaxnorm": functools.partial(block, norm=jaxnorm.rms_norm, mlp=jaxnorm.gated_linear),
    "gpt2": gpt2,
    "relu": functools.partial(gpt2, activation=jax.nn.relu),
    "attention": attention,
    "jit": jax.jit(block),
    "checkpoint": jax.checkpoint(block),
    "save_policy": POLICY(functools.partial(block, norm=jaxnorm.rms_norm)),
    "dots": DOTS(block),
}


@pytest.mark.remat
@pytest.mark.parametrize("stack", [scan, unrolled])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_total_is_jax_s(name, stack):
    f = functools.partial(stack, BLOCKS[name])
    report = memory_report(f, weights(), X, argnums=(0, 1))
    concrete = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), (weights(), X))
    assert report.total == pytest.approx(of_jax(f, *concrete), rel=1e-3)
    assert report.total == sum(row.bytes for row in report)
    assert not any("hi_primitive" in row.made_by for row in report)
    assert [row.bytes for row in report] == sorted((row.bytes for row in report), reverse=True)
    for row in report:
        arrays = row.count / row.layers
        assert row.bytes == np.prod(row.shape) * row.dtype.itemsize * arrays
        assert 0 <= row.saves <= row.bytes
        assert (row.advice is None) == (row.saves == 0)


def with_a_mask(x, w):
    """Attention with a mask and a bias of positions, which no plan saves."""
    q, k = ((x @ w[name]).reshape(TOKENS, 8, -1) for name in ("gate", "up"))
    distance = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)
    logits = jnp.einsum("qhd,khd->hqk", q, k) - 0.1 * distance * w["bias"][:8, None, None]
    masked = jnp.where(jnp.broadcast_to(distance >= 0, logits.shape), logits, -jnp.inf)
    p = jax.nn.softmax(masked)
    return x + jnp.einsum("hqk,khd->qhd", p, k).reshape(TOKENS, -1) @ w["down"]


def two_reshapes(x, w):
    """Save an array, and a reshaped copy of it, as attention does before its last matmul."""
    heads = jnp.exp((x @ w["up"]).reshape(TOKENS, 8, -1))
    return x + heads.reshape(TOKENS, -1) @ w["down"]


def assert_remat_true(before, after):
    """Assert that the line about auto_remat is true, and the only advice.

    `before` and `after` are the reports of a function and of the same function with auto_remat.
    """
    assert before.saves == before.total - after.total > 0
    assert "auto_remat saves" in str(before)
    assert after.saves == 0


@pytest.mark.parametrize("stack", [scan, unrolled])
@pytest.mark.parametrize(
    "block", [block, gpt2, attention, with_a_mask, two_reshapes], ids=lambda f: f.__name__
)
def test_what_auto_remat_saves(block, stack):
    """The report states exactly how many bytes auto_remat saves, and no row has other advice."""
    f = functools.partial(stack, block)
    report = memory_report(f, weights(), X, argnums=(0, 1))
    assert_remat_true(report, memory_report(jaxnorm.auto_remat(f), weights(), X, argnums=(0, 1)))
    assert not told(report)
    plan = jaxnorm.remat_plan(f, weights(), X, argnums=(0, 1))
    assert f"takes {plan.recompute:.1%} of" in " ".join(str(report).split())


def test_auto_remat_saves_no_masks():
    """No array with the elements of a mask, or of a bias of attention, is saved."""
    f = functools.partial(scan, with_a_mask)
    logits = 8 * TOKENS**2
    before, after = (memory_report(g, weights(), X) for g in (f, jaxnorm.auto_remat(f)))
    assert any(row.dtype == bool and np.prod(row.shape) == logits for row in before)
    assert [row.shape for row in after if np.prod(row.shape) >= logits] == [(LAYERS, 8, 64, 64)]


def test_all_advice_together():
    """`saves` is the number of bytes after auto_remat and a linear loss are used together."""

    def plain(x, head, labels):
        logits = (x @ head).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def whole(loss, w, head, x):
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, w)
        return loss(x, head, jnp.zeros(len(x), int))

    shapes = (WIDTH, 4096), (16 * TOKENS, WIDTH)
    args = weights(), *(jax.ShapeDtypeStruct(shape, X.dtype) for shape in shapes)
    before = memory_report(functools.partial(whole, plain), *args, argnums=(0, 1))
    ours = jaxnorm.auto_remat(functools.partial(whole, jaxnorm.linear_softmax_cross_entropy))
    after = memory_report(ours, *args, argnums=(0, 1))
    assert told(before, "linear_softmax_cross_entropy")
    assert before.total - after.total == pytest.approx(before.saves, rel=0.1)
    starts = [line.split(" MiB")[0] for line in str(before).splitlines() if " saves " in line]
    assert [start.split(" saves ")[0] for start in starts[:2]] == [
        "auto_remat",
        "linear_softmax_cross_entropy",
    ]


def linen_model():
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            y = flax.linen.LayerNorm(dtype=jnp.bfloat16, use_fast_variance=False)(x)
            y = flax.linen.gelu(flax.linen.Dense(INNER, dtype=jnp.bfloat16)(y))
            return x + flax.linen.Dense(WIDTH, dtype=jnp.bfloat16)(y)

    model = Model()
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), X)


def nnx_model():
    class Module(flax.nnx.Module):
        def __init__(self, rngs):
            self.norm = flax.nnx.LayerNorm(WIDTH, rngs=rngs, use_fast_variance=False)
            self.up = flax.nnx.Linear(WIDTH, INNER, rngs=rngs)
            self.down = flax.nnx.Linear(INNER, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

    graph, state = flax.nnx.split(Module(flax.nnx.Rngs(0)))
    return lambda state, x: flax.nnx.merge(graph, state)(x), state


def equinox_model():
    """An equinox model may have functions as leaves, and layers under `jax.vmap`."""
    key = jax.random.key(0)
    mlp = equinox.nn.MLP(WIDTH, WIDTH, INNER, 1, jax.nn.gelu, key=key)
    attention = equinox.nn.MultiheadAttention(2, WIDTH, key=key)
    layers = equinox.nn.LayerNorm(WIDTH), attention, mlp

    def apply(layers, x):
        norm, attention, mlp = layers
        y = jax.vmap(norm)(x)
        return jax.vmap(mlp)(attention(y, y, y))

    return apply, layers


@pytest.mark.parametrize("make", [linen_model, nnx_model, equinox_model])
def test_modules(make):
    """The report names source lines of the user's code, not of a library's.

    Models may have leaves that are not arrays.
    """
    apply, params = make()

    def report(remat):
        return memory_report(remat(lambda params, x: jnp.sum(jnp.sin(apply(params, x)))), params, X)

    before = report(lambda f: f)
    assert_remat_true(before, report(jaxnorm.auto_remat))
    assert not told(before)
    assert all(row.source.startswith(f"{Path(__file__).name}:") for row in before)


def test_stacked_by_the_user():
    """An array that user code stacked is reported as one array.

    Only an array in which a scan stacks its residuals is reported as several arrays, one per layer.
    """

    def f(x):
        y = jnp.stack([jnp.sin(x), jnp.cos(x)])
        return jnp.sum(y * y)

    report = memory_report(f, jnp.ones((4, 8)))
    (stacked,) = [row for row in report if row.shape == (2, 4, 8)]
    assert stacked.made_by in ("stack", "concatenate")
    assert stacked.layers == 1


def test_inside_other_loops():
    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)
        return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    report = memory_report(lambda x: jnp.sum(f(x)), jnp.ones(8))
    assert report.total >= 3 * 8 * 4
    assert str(report)


def test_a_function_that_prints():
    def f(w, x):
        jax.debug.print("{}", jnp.sum(x))
        return unrolled(block, w, x)

    report = memory_report(f, weights(), X)
    assert report.saves == memory_report(functools.partial(unrolled, block), weights(), X).saves


def test_a_pair():
    f = functools.partial(scan, block)
    plain = memory_report(f, weights(), X)
    assert memory_report(lambda w, x: (f(w, x), x), weights(), X, has_aux=True) == plain
    assert memory_report(lambda x, w: f(w, x), X, weights(), argnums=1) == plain
    for argnums in (-1, np.int64(1), (1,)):
        assert memory_report(lambda x, w: f(w, x), X, weights(), argnums=argnums) == plain


TWELVE = 12


def twelve_layers():
    w = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    x = jax.ShapeDtypeStruct((256, WIDTH), "float32")

    def loss(ws, x):
        return jnp.sum(functools.reduce(block, ws, x))

    return memory_report(loss, [w] * TWELVE, x)


def test_equal_arrays_are_one_row():
    report = twelve_layers()
    keys = [(r.source, r.shape, r.dtype, r.made_by, r.layers, r.advice) for r in report]
    assert len({*keys}) == len(keys)
    (logistic,) = [row for row in report if row.made_by == "logistic"]
    assert (logistic.count, logistic.layers, logistic.shape) == (TWELVE, 1, (256, INNER))
    assert logistic.bytes == TWELVE * 256 * INNER * 4
    assert report.total == sum(row.bytes for row in report.rows)
    (scanned,) = [row for row in report_of(block) if row.made_by == "logistic"]
    assert (scanned.count, scanned.layers, scanned.shape) == (LAYERS, LAYERS, (3, TOKENS, INNER))


def test_what_is_printed():
    """For twelve equal layers, the printed report has at most 25 lines of 100 characters.

    Small arrays share a line. A line says how many bytes auto_remat saves. The last lines are
    totals.
    """
    report = twelve_layers()
    lines = str(report).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    saved = f"{report.saves / 2**20:.3g} of {report.total / 2**20:.3g} MiB"
    assert any(line.startswith(f"auto_remat saves {saved}: ") for line in lines)
    shown = [line for line in lines if "float32[" in line]
    small = [row for row in report if row.bytes < 0.005 * report.total]
    assert len(shown) == len(report) - len(small)
    assert len(small) < 2 or f"{len(small)} rows are not shown" in str(report)
    total = " ".join(lines[-2:])
    assert f"{report.total / 2**20:.3g} MiB are saved" in total
    assert total.endswith(f"All advice together saves {report.saves / 2**20:.3g} MiB.")
    assert "XLA may keep less" in total


def test_the_table():
    report = report_of(block)
    text = report.table()
    assert "bfloat16[3,64,128]" in text
    assert len(text.splitlines()) == len(report) + 1
    assert report.table(len(report)) == text
    few = report.table(max_rows=2).splitlines()
    assert len(few) == 4
    rest = sum(row.bytes for row in report.rows[2:]) / 2**20
    assert few[-1] == f"{len(report) - 2} rows are not shown: {rest:.3g} MiB"
    assert report.table(len(report) - 1).splitlines()[-1].startswith("1 row is not shown")
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="max_rows"):
            report.table(wrong)


def test_long_names_are_cut():
    """Names of files and functions are cut if they are too long. The line numbers remain."""
    source = f"a_file_with_a_very_long_name_{'x' * 60}.py:1234 (a_function)"
    row = jaxnorm.tools.memory_report.KeptArray(
        2**30, (64, 1024, 128256, 16, 16), np.dtype("float32"), source, "convert_element_type", 1,
        "linear_softmax_cross_entropy: do", 2**29, 7,
    )  # fmt: skip
    text = jaxnorm.MemoryReport(2**30, (row,)).table()
    assert max(map(len, text.splitlines())) <= 100
    assert ".py:1234" in text


def test_in_a_notebook():
    report = report_of(block)
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == len(report) + 1
    assert html.count("<td>") == 6 * (len(report) + 1)
    assert "auto_remat saves" in html
    assert "<lambda>" not in memory_report(lambda x: jnp.sum(jnp.sin(x)), X)._repr_html_()


def test_a_function_without_a_transpose():
    def loop(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: 2 * c, x).sum()

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as theirs:
        jax.grad(loop)(jnp.ones(4))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as ours:
        memory_report(loop, jnp.ones(4))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("args", "argnums", "message"),
    [
        ((jnp.sum, 1.0), "0", "argnums='0'; expected an integer or a sequence of integers"),
        ((jnp.sum, 1.0), 0.0, "argnums=0.0; expected an integer or a sequence of integers"),
        ((jnp.sum, 1.0), 2, "argnums=2 of 1 arguments; expected integers from -1 to 0"),
        ((lambda: 0.0,), 0, "argnums=0 of 0 arguments; expected arguments after f"),
        ((jnp.ones(8),), 0, "f is a .*; expected a function, and"),
    ],
)
def test_errors(args, argnums, message):
    with pytest.raises((TypeError, ValueError), match=f"^memory_report: {message}"):
        memory_report(*args, argnums=argnums)


@pytest.mark.parametrize(
    ("f", "saved"), [(lambda w: 0.0, 0), (lambda w: (jnp.tanh(w).sum(), 3), 1)]
)
def test_a_function_that_returns_python_numbers(f, saved):
    report = memory_report(f, jnp.ones((4, 4)))
    assert report.total == saved * 4 * 4 * 4
    assert memory_report(lambda x: x * 2.0, 3.0).total == 0
    assert "0 MiB" in str(memory_report(jnp.sum, jnp.ones(8)))


@pytest.mark.parametrize("tokens", [jnp.zeros((4, 8), int), {"a": np.zeros(3, bool)}, 3])
def test_arguments_without_floats(tokens):
    """`jax.grad` raises TypeError for such an argument, too."""

    def loss(tokens, w):
        return jnp.sin(jax.tree.leaves(tokens)[0] * w).sum()

    with pytest.raises(TypeError):
        jax.grad(loss)(tokens, 2.0)
    with pytest.raises(TypeError, match=r"^memory_report: argument 0 of f has only .*argnums="):
        memory_report(loss, tokens, 2.0)
    assert memory_report(loss, tokens, 2.0, argnums=1).total > 0


LIBRARY = """
def matmul(x, w):
    return x @ w


def block(x, w):
    return matmul(x, w) ** 2
"""


def test_sources_in_installed_packages(tmp_path, monkeypatch):
    """The source is the user's line that calls a package, or a line with the package's name."""
    folder = tmp_path / "site-packages" / "layers_of_a_test"
    folder.mkdir(parents=True)
    (folder / "ops.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder.parent)
    ops = importlib.import_module("layers_of_a_test.ops")
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH))
    (row,) = memory_report(lambda w, x: ops.block(x, w).sum(), w, x)
    assert re.fullmatch(r"test_memory_report.py:\d+ \(.*<lambda>\)", row.source)
    is_installed = kept_arrays.is_installed
    monkeypatch.setattr(
        kept_arrays, "is_installed", lambda file: file == __file__ or is_installed(file)
    )
    (row,) = memory_report(ops.block, x, w)
    assert row.source.startswith("layers_of_a_test/ops.py:7 (block)")
