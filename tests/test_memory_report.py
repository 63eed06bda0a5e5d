"""memory_report: its total equals JAX's, its source lines are the user's, its advice is correct."""

import functools
import gc
import importlib
import re
import time

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advice_cases import assert_all_true, assert_true, functions_of, told

import jaxnorm
import jaxnorm.linen
from jaxnorm import memory_report
from jaxnorm.tools import kept_arrays, memory_advice

pytestmark = pytest.mark.oldest_jax

# Primitives that only the oldest or only the newest supported JAX has.
NOT_IN_ALL_VERSIONS = {"polynomial"}

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


def gpt2(x, w, *, activation=jax.nn.gelu, has_bias=True, followed=False):
    h = x @ w["up"]
    if has_bias:
        h += w["bias"]
    if followed:
        return x + jaxnorm.activation_linear(h, w["down"], activation=activation)
    return x + activation(h) @ w["down"]


def with_dropout(x, w, *, is_gated=False, followed=False):
    """An MLP with dropout between the activation and the next linear layer, as in Flax."""
    key = jax.random.fold_in(jax.random.key(0), w["bias"][0].astype(int))  # different in each layer

    def product(h, weight):
        return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0) @ weight

    h, up = x @ w["gate"], x @ w["up"]
    if followed and is_gated:
        return x + jaxnorm.gated_linear(h, up, w["down"], product=product)
    if followed:
        return x + jaxnorm.activation_linear(h, w["down"], product=product)
    return x + product(jax.nn.silu(h) * up if is_gated else jax.nn.gelu(h), w["down"])


def attention(x, w, *, softmax=jax.nn.softmax):
    """Self-attention whose heads are split and joined by reshapes, with float32 probabilities."""
    q, k = ((x @ w[name]).reshape(TOKENS, 8, -1) for name in ("gate", "up"))
    logits = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
    p = softmax(logits).astype(x.dtype)
    return x + jnp.einsum("hqk,khd->qhd", p, k).reshape(TOKENS, -1) @ w["down"]


def softmax_of_16_bits(logits):
    return jaxnorm.softmax(logits, dtype=jnp.bfloat16)


def of_jax(capsys, f, *args):
    """Return the bytes of the arrays that `jax.ad_checkpoint.print_saved_residuals` lists.

    Arguments of `f` and constants are not counted.
    """
    jax.ad_checkpoint.print_saved_residuals(f, *args)
    sizes = {"f32": 4, "bf16": 2, "bool": 1, "i32": 4, "f64": 8, "u32": 4}
    total = 0
    for line in capsys.readouterr().out.splitlines():
        dtype, shape = re.match(r"(\w+)\[([\d,]*)\]", line).groups()
        if "from the argument" not in line and "from a constant" not in line:
            total += sizes[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
    return total


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
def test_the_total_is_jax_s(capsys, name, stack):
    f = functools.partial(stack, BLOCKS[name])
    report = memory_report(f, weights(), X, argnums=(0, 1))
    concrete = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), (weights(), X))
    assert report.total == pytest.approx(of_jax(capsys, f, *concrete), rel=1e-3)
    assert report.total == sum(row.bytes for row in report)
    assert [row.bytes for row in report] == sorted((row.bytes for row in report), reverse=True)
    for row in report:
        arrays = row.count / row.layers
        assert row.bytes == np.prod(row.shape) * row.dtype.itemsize * arrays
        assert 0 <= row.saves <= row.bytes
        assert (row.advice is None) == (row.saves == 0)


FOLLOWED = {
    "activation_linear, float32": tuple(
        functools.partial(gpt2, activation=act, has_bias=False, followed=followed)
        for act, followed in (
            (lambda h: jnp.tanh(h.astype(jnp.float32)).astype(h.dtype), False),
            (jnp.tanh, True),
        )
    ),
    "activation_linear, vmap": tuple(
        functools.partial(gpt2, activation=jax.vmap(jax.nn.relu), followed=followed)
        for followed in (False, True)
    ),
    "gated_linear": (block, functools.partial(block, mlp=jaxnorm.gated_linear)),
    "rms_norm": (block, functools.partial(block, norm=jaxnorm.rms_norm)),
    "softmax": (attention, functools.partial(attention, softmax=softmax_of_16_bits)),
    **{
        f"activation_linear, {activation.__name__}": (
            functools.partial(gpt2, activation=activation),
            functools.partial(gpt2, activation=activation, followed=True),
        )
        for activation in (jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.sigmoid)
    },
    # These activations add a constant to their operand. The advice must not take it for a bias.
    **{
        f"activation_linear, {activation.__name__}": tuple(
            functools.partial(gpt2, activation=activation, has_bias=False, followed=followed)
            for followed in (False, True)
        )
        for activation in (jax.nn.softplus, jax.nn.hard_swish, jax.nn.mish)
    },
    **{
        f"{name}, dropout": tuple(
            functools.partial(with_dropout, is_gated=name == "gated_linear", followed=followed)
            for followed in (False, True)
        )
        for name in ("activation_linear", "gated_linear")
    },
}


@pytest.mark.parametrize("stack", [scan, unrolled])
@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_is_true(name, stack):
    before, after = (report_of(one, stack) for one in FOLLOWED[name])
    assert_true(before, after, name.split(",")[0])


def test_a_result_that_is_cast_to_more_bits():
    """A norm's 16-bit result is cast to float32, and the float32 array is saved.

    jaxnorm's norm does not change this: the float32 array is saved with and without it. So the
    number of bytes that the advice promises must not include this array.
    """

    def step(norm, x, w):
        y = norm(x @ w["up"], w["bias"])
        y = y.astype(jnp.float32)
        return x + jnp.sin(y).astype(x.dtype) @ w["down"]

    before, after = (report_of(functools.partial(step, n)) for n in (norm, jaxnorm.rms_norm))
    assert_true(before, after, "rms_norm")
    assert not any("dtype" in row.advice for row in told(before, "rms_norm"))


def test_lines_are_the_user_s():
    report = report_of(block)
    names = {re.fullmatch(r"(\S+):(\d+) \((\S+)\)", row.source).group(1, 3) for row in report}
    assert names <= {(__file__.rpartition("/")[2], n) for n in ("norm", "gated", "block", "scan")}
    (silu, *_) = [row for row in report if row.made_by == "logistic"]
    assert silu.source.endswith("(gated)")
    assert silu.layers == LAYERS
    assert silu.shape == (LAYERS, TOKENS, INNER)


def reshaped(x, w, *, followed=False):
    heads = jnp.exp((x @ w["up"]).reshape(TOKENS, 8, -1))

    def out(heads, weight):
        return heads.reshape(TOKENS, -1) @ weight

    return x + (jax.checkpoint(out) if followed else out)(heads, w["down"])


def cast(x, w, *, followed=False):
    wide = jnp.exp((x @ w["up"]).astype(jnp.float32))
    # `wide` is used twice, so advice on an activation before a matmul does not apply.
    x = x + jnp.sum(jnp.sin(wide)).astype(x.dtype)

    def out(wide, weight):
        return wide.astype(jnp.bfloat16) @ weight

    return x + (jax.checkpoint(out) if followed else out)(wide, w["down"])


@pytest.mark.parametrize("one", [reshaped, cast])
def test_what_a_scan_keeps_twice(one):
    """There is advice if a scan saves both an array and a reshaped or cast copy of it.

    Outside of a loop, XLA needs no copy for a reshape. So there is no such advice there.
    """
    before, after = report_of(one), report_of(functools.partial(one, followed=True))
    (row,) = told(before)
    assert "put it and what takes it into one jax.checkpoint" in row.advice
    assert before.total - after.total == row.saves == row.bytes
    assert not told(after)
    if one is reshaped:
        assert not told(report_of(one, unrolled))


def wide_norm(x, w, *, dtype="float32", is_used=False):
    """Normalise to `dtype`, and cast the result for each of two matmuls, as Flax's Dense does."""
    y = jaxnorm.rms_norm(x, w["scale"], dtype=dtype)
    gate, up = (jnp.sin(y.astype(jnp.bfloat16) @ w[name]) for name in ("gate", "up"))
    x = x + (gate * up) @ w["down"]
    return x + jnp.tanh(y).astype(x.dtype) if is_used else x


def test_a_norm_that_each_user_casts():
    """There is advice for a norm's dtype if all users of its result cast it to fewer bits."""
    before, after = (report_of(functools.partial(wide_norm, dtype=d)) for d in ("float32", X.dtype))
    rows = told(before, "rms_norm")
    assert all("dtype=bfloat16" in row.advice for row in rows)
    assert before.total - after.total == sum(row.saves for row in rows) > 0
    assert not told(after, "rms_norm")
    assert not told(report_of(functools.partial(wide_norm, is_used=True)), "rms_norm")


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_modules(library):
    """The report names source lines of the user's code, not of Flax's.

    Models may have leaves that are not arrays.
    """
    if library == "linen":

        class Model(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x):
                y = flax.linen.LayerNorm(dtype=jnp.bfloat16, use_fast_variance=False)(x)
                y = flax.linen.gelu(flax.linen.Dense(INNER, dtype=jnp.bfloat16)(y))
                return x + flax.linen.Dense(WIDTH, dtype=jnp.bfloat16)(y)

        model = Model()
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        report = memory_report(lambda p, x: jnp.sum(model.apply(p, x)), params, X)
    else:

        class Module(flax.nnx.Module):
            def __init__(self, rngs):
                self.norm = flax.nnx.LayerNorm(WIDTH, rngs=rngs, use_fast_variance=False)
                self.up = flax.nnx.Linear(WIDTH, INNER, rngs=rngs)
                self.down = flax.nnx.Linear(INNER, WIDTH, rngs=rngs)

            def __call__(self, x):
                return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

        graph, state = flax.nnx.split(Module(flax.nnx.Rngs(0)))
        report = memory_report(lambda s, x: jnp.sum(flax.nnx.merge(graph, s)(x)), state, X)
    assert functions_of(report) == {"layer_norm", "activation_linear"}
    assert all("__call__)" in row.source or "<lambda>)" in row.source for row in report)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_advice_on_flax_s_norms(name):
    """Replacing Flax's norms by `jaxnorm.linen` reduces the saved bytes as the advice states."""

    class Model(flax.linen.Module):
        norm: type[flax.linen.Module]

        @flax.linen.compact
        def __call__(self, x):
            for _ in range(2):
                y = self.norm(dtype=jnp.bfloat16)(x)
                x = x + flax.linen.Dense(WIDTH, dtype=jnp.bfloat16)(y)
            return x

    before, after = (
        memory_report(
            lambda p, x, m=m: jnp.sum(m.apply(p, x).astype(jnp.float32)),
            jax.eval_shape(m.init, jax.random.key(0), X),
            X,
            argnums=(0, 1),
        )
        for m in (Model(getattr(module, name)) for module in (flax.linen, jaxnorm.linen))
    )
    function = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}[name]
    assert functions_of(before) == {function}
    assert_true(before, after, function)


def test_an_equinox_model():
    """An equinox model may have functions as leaves, and layers under `jax.vmap`."""
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(WIDTH, WIDTH, INNER, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    report = memory_report(lambda m, x: jnp.sum(jax.vmap(m)(x)), model, jnp.ones((TOKENS, WIDTH)))
    assert report.total > TOKENS * INNER * 4
    assert all(row.source.startswith("test_memory_report.py") for row in report)


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
    assert report.saves == sum(row.saves for row in report.rows)
    (scanned,) = [row for row in report_of(block) if row.made_by == "logistic"]
    assert (scanned.count, scanned.layers, scanned.shape) == (LAYERS, LAYERS, (3, TOKENS, INNER))


def test_what_is_printed():
    """For twelve equal layers, the printed report has at most 25 lines of 100 characters.

    Small arrays share a line. If the report advises a function in several layers, a single line
    says how many bytes the function saves in all these layers. The last lines are totals.
    """
    report = twelve_layers()
    lines = str(report).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    of_gated = next(line for line in lines if line.startswith("gated_linear saves "))
    saves = sum(row.saves for row in told(report, "gated_linear"))
    mib = f"{saves / 2**20:.3g} of {report.total / 2**20:.3g} MiB"
    assert of_gated.startswith(f"gated_linear saves {mib}: test_memory_report.py:")
    assert of_gated.endswith(f", {TWELVE} times")
    instruction = " ".join(lines[lines.index(of_gated) + 1 :])
    assert "replace the down projection at test_memory_report.py:" in instruction
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
    assert "gated_linear saves" in html
    assert "<lambda>" not in memory_report(lambda x: jnp.sum(jnp.sin(x)), X)._repr_html_()


def test_a_function_without_a_transpose():
    def loop(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: 2 * c, x).sum()

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as theirs:
        jax.grad(loop)(jnp.ones(4))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as ours:
        memory_report(loop, jnp.ones(4))
    assert str(ours.value) == str(theirs.value)


def mlp(w, x, *, followed=False):
    if followed:
        y = jaxnorm.gated_linear(x @ w["gate"], x @ w["up"], w["down"])
    else:
        y = gated(x @ w["gate"], x @ w["up"], w["down"])
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


@pytest.mark.parametrize("trained", ["all", "gate and up", "input", "input, closed over"])
def test_frozen_weights(trained):
    """If some weights are frozen, advice counts only arrays that the remaining gradients need.

    For example, if gate and up are trained and down is frozen, the input of the down projection is
    not saved. Only the gradient of down would need it.
    """
    w = {n: jnp.ones(SHAPES[n], "bfloat16") for n in ("gate", "up", "down")}
    x = jnp.ones(X.shape, X.dtype)

    def report(followed):
        f = functools.partial(mlp, followed=followed)
        if trained == "all":
            return memory_report(f, w, x, argnums=(0, 1))
        if trained == "gate and up":
            first = {n: w[n] for n in ("gate", "up")}
            return memory_report(lambda v, w, x: f(w | v, x), first, w, x)
        if trained == "input":
            return memory_report(f, w, x, argnums=1)
        return memory_report(lambda x: f(w, x), x)

    assert_all_true(report(False), report(True), "gated_linear")


def divided(x, scale):
    """Compute RMSNorm as Hugging Face's models do."""
    wide = jnp.asarray(x, dtype=jnp.float32)
    mean = jnp.power(wide, 2).mean(-1, keepdims=True)
    return scale * jnp.asarray(x / jnp.sqrt(mean + 1e-6), dtype=x.dtype)


def scale_first(x, scale):
    """Compute RMSNorm as Tunix's Qwen 3 does."""
    wide = jnp.astype(x, jnp.float32)
    rms = jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.astype(scale * wide / rms, x.dtype)


def one_plus(x, scale):
    """Compute RMSNorm as Gemma does."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (normed * (1 + jnp.expand_dims(scale, 0))).astype(x.dtype)


def by_variance(x, scale):
    wide = x.astype(jnp.float32)
    mean, var = jnp.mean(wide, -1, keepdims=True), jnp.var(wide, -1, keepdims=True)
    return ((wide - mean) / jnp.sqrt(var + 1e-6) * scale).astype(x.dtype)


def standardized(x, scale):
    return (jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6) * scale).astype(x.dtype)


class NormOfAClass:
    """An RMSNorm in a class. A `checkpoint_name` is given to the reciprocal root mean square."""

    def __call__(self, x, scale):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jax.lax.square(wide), axis=-1)
        rstd = jax.ad_checkpoint.checkpoint_name(jax.lax.rsqrt(mean + 1e-6), "rstd")
        return (wide * rstd[..., None]).astype(x.dtype) * scale.astype(x.dtype)


OWN_NORMS = {
    "divided": (divided, jaxnorm.rms_norm),
    "scale first": (scale_first, jaxnorm.rms_norm),
    "one plus": (one_plus, functools.partial(jaxnorm.rms_norm, scale_offset=1.0)),
    "by variance": (by_variance, jaxnorm.layer_norm),
    "standardized": (standardized, jaxnorm.layer_norm),
    "class": (NormOfAClass(), jaxnorm.rms_norm),
}


@pytest.mark.parametrize("stack", [scan, unrolled])
@pytest.mark.parametrize("name", OWN_NORMS)
def test_norms_of_the_user_s_own(name, stack):
    def step(norm, x, w):
        return x + jnp.sin(norm(x, w["scale"]) @ w["up"]) @ w["down"]

    before, after = (report_of(functools.partial(step, n), stack) for n in OWN_NORMS[name])
    function = OWN_NORMS[name][1]
    assert_all_true(before, after, getattr(function, "func", function).__name__)


def test_primitives_that_recognisers_look_for():
    """The installed JAX has every primitive that the recognisers of `memory_advice` look for.

    A recogniser finds one pattern in a traced program. If a new JAX renames a primitive, the
    failure names the recogniser to change.
    """
    names = {p.name for p in gc.get_objects() if isinstance(p, jax.extend.core.Primitive)}
    ours = {name for name in names if name.startswith("jaxnorm.")}
    for find, primitives in memory_advice.RECOGNISERS.items():
        assert find.__doc__.count("    ::") == 1
        missing = (memory_advice.COMMON | primitives) - names - NOT_IN_ALL_VERSIONS
        assert not missing, (find.__name__, missing)
    assert ours


def test_nothing_is_kept():
    report = memory_report(jnp.sum, jnp.ones(8))
    assert (report.total, report.rows) == (0, ())
    assert "0 MiB" in str(report)


@pytest.mark.parametrize(
    ("argnums", "error", "message"),
    [
        ("0", TypeError, "argnums='0'; expected an integer or a sequence of integers"),
        (0.0, TypeError, "argnums=0.0; expected an integer or a sequence of integers"),
        (2, ValueError, "argnums=2 of 1 arguments; expected integers from -1 to 0"),
    ],
)
def test_errors(argnums, error, message):
    with pytest.raises(error, match=f"^memory_report: {message}"):
        memory_report(jnp.sum, jnp.ones(8), argnums=argnums)


def test_errors_of_calls():
    """Two wrong calls raise errors.

    The first passes a function's result instead of the function. The second passes no arguments.
    """
    with pytest.raises(TypeError, match=r"^memory_report: f is a .*; expected a function, and"):
        memory_report(jnp.sum(jnp.ones(8)))
    with pytest.raises(ValueError, match="argnums=0 of 0 arguments; expected arguments after f"):
        memory_report(lambda: 0.0)


@pytest.mark.parametrize(
    ("f", "saved"), [(lambda w: 0.0, 0), (lambda w: (jnp.tanh(w).sum(), 3), 1)]
)
def test_a_function_that_returns_python_numbers(f, saved):
    report = memory_report(f, jnp.ones((4, 4)))
    assert report.total == saved * 4 * 4 * 4
    assert memory_report(lambda x: x * 2.0, 3.0).total == 0


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


def test_norms_inside_and_after_a_scan_are_counted():
    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (x + norm(x, 1.0) @ w, None), x, w)
        return (norm(x, 1.0) @ w[0]).sum()

    text = str(memory_report(loss, jnp.ones((4, WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH))))
    assert re.search(r"rms_norm saves .*, 5 times", text)


def test_the_line_of_a_norm_is_not_that_of_the_layer_before_it():
    def loss(w, x):
        h = x @ w + 1.0
        y = norm(h, 1.0)
        return (y @ w).sum()

    report = memory_report(loss, jnp.ones((WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH)))
    assert {re.search(r":(\d+) with", row.advice)[1] for row in told(report)} == {
        str(norm.__code__.co_firstlineno + 4)
    }


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


def test_a_large_model_takes_seconds():
    """The report of a 7B model (32 unrolled layers of width 4096) takes only seconds."""
    shapes = {"scale": (4096,), "gate": (4096, 11008), "up": (4096, 11008), "down": (11008, 4096)}
    w = [{n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in shapes.items()}] * 32

    def loss(w, x):
        return jnp.sum(functools.reduce(block, w, x).astype(jnp.float32))

    begin = time.monotonic()
    report = memory_report(loss, w, jax.ShapeDtypeStruct((8192, 4096), "bfloat16"))
    assert time.monotonic() - begin < 60
    assert report.total > 2**30 * 32
