"""Programs of residual norms: kernels, operations on whole arrays, and residuals."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from norms import normal
from pairs import each_pair
from program_error import assert_computes
from programs import equations, primitives, results_of_kernels, text_for_cuda

import jaxnorm

pytestmark = pytest.mark.oldest_jax

WRAPPED = {
    "plain": lambda block: block,
    "remat": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
    "jit": jax.jit,
}


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "written"),
    [("bfloat16", "bfloat16", 1), ("bfloat16", "float32", 2), ("float32", "bfloat16", 1)],
)
def test_a_block_is_a_kernel_each_way(x_dtype, dtype, written):
    """A residual norm runs one kernel per pass. Any other code at most casts a gradient.

    The gradients of x and of the residual are equal up to rounding. If both have the same dtype,
    the backward kernel stores one array, which is both gradients. If x's dtype is narrower, the
    kernel stores two arrays. If x's dtype is wider, the kernel stores only the residual's gradient,
    and XLA casts it to x's dtype.
    """
    shape = (8192, 4096)
    x, residual = jax.ShapeDtypeStruct(shape, x_dtype), jax.ShapeDtypeStruct(shape, dtype)
    scale = jax.ShapeDtypeStruct(shape[1:], "float32")

    def both(x, residual, scale, *cotangents):
        results, vjp = jax.vjp(jaxnorm.add_rms_norm, x, residual, scale)
        return results, vjp(cotangents)

    text = text_for_cuda(both, x, residual, scale, x, residual)
    results = [line.count("8192x4096") for line in results_of_kernels(text)]
    assert results == [2, written]
    # Apart from the kernels, the cast of x's gradient is the only operation on arrays of this size.
    others = re.findall(r"stablehlo\.(?:add|convert|multiply|transpose) .*8192x4096.*", text)
    assert len(others) == (x_dtype == "float32")
    assert all("8192x4096xbf16>) -> tensor<8192x4096xf32>" in line for line in others)


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_costs_no_pass_backward(used):
    x, scale = jnp.ones((4, 16)), jnp.ones(16)

    def loss(x, residual, scale):
        return jnp.sum(jnp.sin(jaxnorm.add_rms_norm(x, residual, scale)[used]))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, scale)
    backward = [e for e in equations(jaxpr) if e.primitive.name.endswith("_norm_backward")]
    # The operands of the backward pass are y, rstd, scale and dy. If the loss does not use y, there
    # is no dy and no backward pass.
    assert [len(equation.invars) for equation in backward] == ([4] if used == 0 else [])


@pytest.mark.parametrize("at", range(3), ids=["x", "residual", "scale"])
def test_derivatives_along_the_residual_run_no_norm(at):
    """This also holds for h if only h is used, whatever the derivatives are taken along."""
    operands = [jnp.ones((4, 16)), jnp.ones((4, 16)), jnp.ones(16)]
    functions = {
        jaxnorm.rms_norm_add: at != 1,
        lambda *a: jaxnorm.add_rms_norm(*a)[1]: False,
    }
    for function, has_passes in functions.items():

        def along(a, function=function):
            def of_one(a):
                return function(*operands[:at], a, *operands[at + 1 :])

            gradient = jax.grad(lambda a: jnp.sum(jnp.sin(of_one(a))))
            return jax.jvp(of_one, (a,), (a,)), gradient(a)

        jaxpr = jax.make_jaxpr(along)(operands[at])
        passes = [
            n for n in primitives(jaxpr) if n.endswith(("_norm_add_tangent", "_add_backward"))
        ]
        assert bool(passes) == has_passes


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm", "rms_norm_add_rms_norm"])
def test_an_unused_sum_is_not_written(name):
    """If h is not used, kernels do not write it.

    This is also the case if a gradient is computed, and in the body of a scan, which JAX traces
    separately.
    """
    shape = (8192, 4096)
    x, scale = jax.ShapeDtypeStruct(shape, "bfloat16"), jax.ShapeDtypeStruct(shape[1:], "float32")

    def only_y(x, scale):
        return getattr(jaxnorm, name)(x, 2 * x, scale)[0]

    def written(function):
        results = results_of_kernels(text_for_cuda(function, x, scale))
        return [line.count("8192x4096") for line in results]

    def scanned(x, scale):
        return jax.lax.scan(lambda x, _: (only_y(x, scale), None), x, None, length=2)[0]

    def loss(x, scale):
        return jnp.sum(only_y(x, scale))

    assert written(only_y) == [1]
    assert written(scanned) == [1]
    forward, _ = written(jax.value_and_grad(loss))
    assert forward == 1


@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm", "rms_norm_add_rms_norm"])
def test_where_the_norm_is_not_used_a_sum_is_left(name, residual):
    """If only h is used, no norm of h is computed, even under gradients, vmap and scan."""
    x, r = normal((8, 16), "bfloat16", 0), normal((8, 16), residual, 1)
    scale = jnp.ones(16)

    def only_h(x, r, scale):
        return getattr(jaxnorm, name)(x, r, scale)[1]

    def summed(x, r, scale):
        return jnp.sum(jnp.sin(only_h(x, r, scale).astype("float32")))

    programs = {
        "forward": only_h,
        "gradient": jax.grad(summed, (0, 1)),
        "batch": jax.vmap(only_h, (0, 0, None)),
        "scan": lambda x, r, s: jax.lax.scan(lambda r, _: (only_h(x, r, s), None), r, length=2)[0],
    }
    norms = dict.fromkeys(programs, 0)
    if name == "rms_norm_add_rms_norm":
        # h = r + norm(x), so norm(x) is computed even if only h is used. The gradient of norm(x)
        # needs the statistics of the rows of x. Only a call that computes both norm(x) and norm(h)
        # returns these statistics. So the program with the gradient computes two norms, although
        # nothing uses norm(h).
        norms = {**dict.fromkeys(programs, 1), "gradient": 2}
    for key, program in programs.items():
        text = jax.jit(program).lower(x, r, scale).as_text()
        assert text.count("rsqrt") == norms[key]


def residual_blocks(norm):
    def block(x, parameters):
        scale, matrix = parameters
        return x + jnp.tanh(norm(x, scale) @ matrix)

    return block


def unrolled(block, x, parameters):
    for i in range(3):
        x = block(x, jax.tree.map(lambda a: a[i], parameters))  # noqa: B023
    return x


def scanned(block, x, parameters):
    return jax.lax.scan(lambda x, p: (block(x, p), None), x, parameters)[0]


def additions_of(jaxpr, shape):
    """Return the number of additions of cotangents of this shape, anywhere in a jaxpr."""
    found = [e for e in equations(jaxpr) if e.primitive.name == "add_any"]
    return sum(e.outvars[0].aval.shape == shape for e in found)


@pytest.mark.usefixtures("quick_to_compile")
@each_pair("name layers wrapped", ["layer_norm", "rms_norm"], [unrolled, scanned], [*WRAPPED])
def test_the_residual_s_gradient_is_added_in_the_norm_s_backward(name, layers, wrapped):
    """If a model computes x + branch(norm(x)), the norm's backward returns the whole gradient of x.

    The model uses x twice: as the residual and as the norm's input. The norm's backward adds the
    gradients of both uses, so the jaxpr has no other addition of gradients.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 8))
    parameters = (
        1 + 0.3 * jax.random.normal(keys[1], (3, 8)),
        jax.random.normal(keys[2], (3, 8, 8)),
    )

    def loss(norm):
        block = WRAPPED[wrapped](residual_blocks(norm))
        return jax.grad(lambda x, p: jnp.sum(layers(block, x, p) ** 2), (0, 1))

    def plain(x, scale):
        centred = x - x.mean(-1, keepdims=True) if name == "layer_norm" else x
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale

    ours, theirs = (jax.jit(loss(norm)) for norm in (getattr(jaxnorm, name), plain))
    # In the case "plain", run the loss outside of `jax.jit`.
    run = loss(getattr(jaxnorm, name)) if wrapped == "plain" else ours
    assert_computes(run(x, parameters), theirs, x, parameters, like=ours)
    additions = [additions_of(jax.make_jaxpr(f)(x, parameters), x.shape) for f in (ours, theirs)]
    assert additions[0] == 0
    assert additions[1] > 0


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("at", [0, 1], ids=["x", "scale"])
def test_second_derivatives_of_such_a_gradient(at):
    """The backward pass, which also takes the residual's gradient, can be transposed.

    It can also be transposed if only one of the gradients that it returns is used.
    """
    operands = normal((4, 16), "float32", 0), 1 + 0.3 * normal((16,), "float32", 1)

    def second(norm):
        gradients = jax.grad(lambda x, s: jnp.sum(x * jnp.sin(norm(x, s))), (0, 1))
        return jax.grad(lambda *a: jnp.sum(jnp.sin(gradients(*a)[at])), (0, 1))

    def plain(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    ours = second(jaxnorm.rms_norm)
    assert_computes(jax.jit(ours)(*operands), second(plain), *operands, like=ours)


def test_without_jax_s_accumulators_the_gradient_is_added_outside(monkeypatch):
    """In versions of JAX without gradient accumulators, the norm's transpose returns dx.

    JAX then adds dx to the gradient of the residual, outside of the norm's backward.
    """
    from jaxnorm.primitives import row_operations

    rules = row_operations._RULES
    monkeypatch.setattr(row_operations, "_accumulators", None)
    # Create the primitives anew, without the transposition rule that uses accumulators.
    monkeypatch.setattr(rules, "primitive", functools.cache(rules.registered))
    x, scale = normal((4, 16), "float32", 0), jnp.ones(16)

    def loss(x):
        return jnp.sum(x * jnp.sin(jaxnorm.rms_norm(x, scale)))

    def plain(x):
        return jnp.sum(x * jnp.sin(x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)))

    assert additions_of(jax.make_jaxpr(jax.grad(loss))(x), x.shape) == 1
    assert_computes(jax.grad(loss)(x), jax.grad(plain), x, like=jax.grad(loss))


def test_a_kernel_that_cannot_take_the_residual_s_gradient_runs_without():
    """If a backward kernel does not support the extra cotangent dh, the call does not fail.

    If the user requested the kernel, it runs without dh, and dh is added to its result. Otherwise,
    XLA runs the backward pass. The kernel supports an array only if its rows have a multiple of 16
    bytes. In this test, the bfloat16 rows of dh do not meet this condition. The float32 rows of y
    and dy meet it.
    """
    x, scale = (
        jax.ShapeDtypeStruct((512, 8196), "bfloat16"),
        jax.ShapeDtypeStruct((8196,), "float32"),
    )

    def loss(x, scale, implementation):
        y = jaxnorm.rms_norm(x, scale, dtype=jnp.float32, implementation=implementation)
        return jnp.sum(x * jnp.sin(y))

    for implementation, kernels in ((None, 1), ("mosaic", 2)):
        gradient = jax.grad(functools.partial(loss, implementation=implementation))
        text = text_for_cuda(gradient, x, scale)
        assert len(results_of_kernels(text)) == kernels
        assert "stablehlo.add" in text
