"""The docs' examples of saving attention's residuals, and of matmuls that must run only once."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from programs import primitives
from test_recipes import page

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.usefixtures("quick_to_compile"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the docs' lines take cuDNN there"),
]

BATCH, LENGTH, HEADS, HEAD = 2, 128, 4, 64
WIDTH = HEADS * HEAD


@pytest.fixture
def cudnn(monkeypatch):
    """Allow JAX to trace cuDNN's attention even if cuDNN is not installed. It is never executed."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)


def flash(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def project(heads, weight):
    return heads.reshape(*heads.shape[:2], -1) @ weight


# ------------------------------------------------------------------------ matmuls do not run twice


def products_in(step, *arrays):
    """Return the number of matmuls in the jaxpr, and the number in the compiled program."""
    traced = jax.jit(step).trace(*arrays)
    made = primitives(traced.jaxpr).count("dot_general")
    return made, len(re.findall(r" dot\(", traced.lower().compile().as_text()))


@pytest.fixture(scope="module")
def of_docs():
    """Return a dict of everything that the examples in docs/transformations.md define."""
    return page("transformations")


def step_of(block):
    """Return a function that computes a block's loss and gradients.

    The loss is ``sum(sin(y))``, where y is the block's result. The gradient of this loss needs y.
    The gradient of ``sum(y)`` would not need y, and XLA would not compute y at all.
    """
    return jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(block(x, w))), argnums=(0, 1))


@pytest.fixture
def custom_vjp3():
    """If ``jax_remat3`` is on, also turn on ``jax_custom_vjp3``.

    If ``jax_remat3`` is on and ``jax_custom_vjp3`` is off, policies do not see the names inside a
    `jax.custom_vjp`.
    """
    is_next = getattr(jax.config, "jax_remat3", False)
    if is_next:
        jax.config.update("jax_custom_vjp3", True)
    yield
    if is_next:
        jax.config.update("jax_custom_vjp3", False)


@pytest.mark.remat
@pytest.mark.usefixtures("custom_vjp3")
def test_no_product_of_a_block_runs_twice(of_docs):
    block, x = of_docs["llama_block"], jnp.ones((2, 32, 256))
    expected = {
        "none": (block, 27),
        "remat": (jax.checkpoint(block), 35),
        "names": (jax.checkpoint(block, policy=of_docs["products"]), 27),
    }
    for name, (around, number) in expected.items():
        made, compiled = products_in(step_of(around), of_docs["params"], x)
        assert compiled == number, name
        # With jax_remat3, the jaxpr contains unused matmuls, which compilation removes.
        assert made == number or getattr(jax.config, "jax_remat3", False), name


def with_a_name_outside(q, k, v):
    return checkpoint_name(flash(q, k, v), "attention")


def kernels_of(attention):
    """Return a function that computes the gradients of a rematerialised block of attention.

    The block saves q, k, v and the residuals that have the name "attention".
    """

    def block(q, k, v, weight):
        q, k, v = (checkpoint_name(2 * a, name) for a, name in zip((q, k, v), "qkv"))
        return jnp.sum(jnp.sin(project(attention(q, k, v), weight)))

    policy = jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attention")
    return jax.grad(jax.checkpoint(block, policy=policy), argnums=(0, 1, 2, 3))


def attention_operands():
    shapes = [(BATCH, LENGTH, heads, HEAD) for heads in (HEADS, 2, 2)] + [(WIDTH, WIDTH)]
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


def test_names_of_cudnn_s_attention(cudnn, of_docs):
    """A policy can save cuDNN's attention only if its derivative rule gives names to its residuals.

    The docs' function `named` uses `checkpoint_name` inside the derivative rule, so the attention
    runs once. If `checkpoint_name` is applied only to the attention's output, the attention runs
    twice.
    """

    def counts(attention):
        jaxpr = jax.make_jaxpr(kernels_of(attention))(*attention_operands()).jaxpr
        names = [name for name in primitives(jaxpr) if name.startswith("dot_product_attention")]
        return [sum(f"_{way}_" in name for name in names) for way in ("fwd", "bwd")]

    assert counts(with_a_name_outside) == [2, 1]
    assert counts(of_docs["named"](flash, "attention")) == [1, 1]
