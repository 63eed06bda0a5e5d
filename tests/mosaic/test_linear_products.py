"""Matmuls and memory traffic of losses whose logits are a matmul, compiled for an H100.

The sizes are those of Llama 3 8B. XLA is restricted to cuBLAS here. On a real GPU, XLA may choose
Triton's matmuls if they are faster. Triton's matmuls, like cuBLAS's, can add their result to an
existing array, as `test_products` expects.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from h100 import Compiler
from hlo import _computations, _elements

import jaxnorm

pytestmark = pytest.mark.compiles

ROWS, D, V = 8192, 4096, 128256
LOGITS = 2 * ROWS * V  # bytes
ACCUMULATOR = 4 * D * V
CHUNKS = {"chunk": 2048}  # fewer rows than the weight, so that the two sizes differ
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def compiled(
    compiler: Compiler, reduction: str, rows: int = ROWS, classes: int = V, donated=(), **options
):
    def loss(x, weight, labels):
        if reduction == "log_prob":
            log_prob, entropy = jaxnorm.linear_log_prob_and_entropy(x, weight, labels, **options)
            return jnp.mean(jnp.exp(log_prob) - entropy)
        result = jaxnorm.linear_softmax_cross_entropy(
            x, weight, labels, reduction=reduction, **options
        )
        return jnp.mean(result)

    shapes = ((rows, D), jnp.bfloat16), ((D, classes), jnp.bfloat16), ((rows,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*each, sharding=compiler.sharding) for each in shapes]
    step = jax.jit(jax.value_and_grad(loss, (0, 1)), donate_argnums=donated)
    return step.lower(*operands).compile(compiler_options=CUBLAS)


@pytest.mark.parametrize(
    ("reduction", "rows", "options"),
    [
        ("mean", ROWS, CHUNKS),
        ("none", ROWS, CHUNKS),
        ("log_prob", ROWS, CHUNKS),
        ("mean", 8000, {"chunk": 768}),
        ("mean", ROWS, {"chunk": 4096}),
    ],
    ids=["mean", "none", "log_prob", "rows that chunks do not divide", "two chunks"],
)
def test_products(compiler: Compiler, reduction, rows, options):
    """A loss and its gradients take 3 matmuls, or 4 if the loss has no reduction.

    In the loop, the matmul that computes the weight's gradient adds its result in place to the
    gradient of earlier chunks.
    """
    program = compiled(compiler, reduction, rows, **options)
    text = program.as_text()
    products = [line for line in text.splitlines() if 'custom_call_target="__cublas' in line]
    # The program has the three matmuls of a chunk twice: once before the loop, for the first chunk,
    # and once in the loop, for all other chunks.
    assert len(products) == 2 * 3 + (reduction != "mean")
    (accumulating,) = (line for line in products if '"beta":1' in line)
    assert f"f32[{D},{V}]" in accumulating.split(" custom-call(")[0]
    assert "output_to_operand_aliasing={{0}: (2, {})}" in accumulating
    # In the loop, only this matmul writes an array of the weight's size. If only one chunk follows
    # the first one, XLA removes the loop.
    computations = dict(_computations(text))
    bodies = re.findall(r"body=%?([\w.\-]+)", text)
    assert len(bodies) == (rows > 2 * options["chunk"]) * (1 if reduction == "mean" else 2)
    made = [
        line
        for body in bodies
        for opcode, kind, line in computations[body]
        if opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast")
        and _elements(kind) >= D * V
    ]
    assert len(made) == (1 if bodies else 0), made
    # For log-probabilities, a chunk's logits are float32, and their 16-bit gradient is a second
    # array. Both exist at the same time, so the peak is 4 + 2 bytes per logit of a chunk. For other
    # losses, the logits have 16 bits and the gradient overwrites them, so the peak is 2 bytes.
    chunk = 2 * options["chunk"] * V * (3 if reduction == "log_prob" else 1)
    assert program.memory_analysis().temp_size_in_bytes < ACCUMULATOR + chunk


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dlogits_take_the_logits_place(compiler: Compiler, reduction):
    """The gradient of the logits overwrites the logits, without a copy of them.

    Before that, another kernel reads the logits. The gradient of the weight overwrites the weight,
    because the test donates the weight.
    """
    program = compiled(compiler, reduction, donated=(1,), **CHUNKS)
    lines = program.as_text().splitlines()
    assert not [line for line in lines if re.search(rf"= bf16\[\d+,{V}\]\S* copy\(", line)]
    calls = [line for line in lines if 'custom_call_target="mosaic_gpu' in line]
    # In each pass over all rows, the kernels of one chunk are in the loop, and others precede it.
    # Without a reduction, the forward pass has a loop of its own, and no chunk precedes this loop.
    kernels = sorted(("_bwd" in line, "output_to_operand_aliasing" in line) for line in calls)
    assert kernels == [(False, False)] * (2 + (reduction == "none")) + [(True, True)] * 2
    workspace = 2**26  # bytes for cuBLAS's own memory, and for arrays with one number per row
    assert program.memory_analysis().temp_size_in_bytes < ACCUMULATOR + LOGITS / 4 + workspace


def test_one_chunk_takes_the_memory_of_the_sum(compiler: Compiler):
    """By default, all rows form a single chunk if this needs no more memory than several chunks.

    Several chunks need a float32 array in which they add up the weight's gradient. A single chunk
    adds nothing up, so its matmul writes the weight's gradient directly in bfloat16.
    """
    default, fewer = (compiled(compiler, "mean", **options) for options in ({}, CHUNKS))
    ours, most = (each.memory_analysis().temp_size_in_bytes for each in (default, fewer))
    assert ours <= most
    text = default.as_text()
    assert text.count('custom_call_target="__cublas') == 3
    kernels = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(kernels) == 2
    assert "while(" not in text
    assert f"f32[{D},{V}]" not in text


def log_prob(x, weight, labels, teacher_x, teacher_weight):
    return jnp.mean(sum(jaxnorm.linear_log_prob_and_entropy(x, weight, labels)))


def log_prob_of_one(logits, label, teacher_x, teacher_weight):
    return sum(jaxnorm.log_prob_and_entropy(logits, label))


def cross_entropy(x, weight, labels, teacher_x, teacher_weight):
    # The logits of `linear_loss` are float32 as well.
    return jaxnorm.linear_softmax_cross_entropy(x, weight, labels, dtype="float32")


def cross_entropy_of_one(logits, label, teacher_x, teacher_weight):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label)


def divergence(x, weight, labels, teacher_x, teacher_weight):
    return jaxnorm.linear_kl_divergence(x, weight, teacher_x, teacher_weight)


def divergence_of_one(logits, label, teacher_x, teacher_weight):
    teacher_logits = jnp.matmul(teacher_x, teacher_weight, preferred_element_type=jnp.float32)
    return jaxnorm.kl_divergence(logits, teacher_logits)


@pytest.mark.parametrize(
    ("function", "of_one"),
    [
        (log_prob, log_prob_of_one),
        (cross_entropy, cross_entropy_of_one),
        (divergence, divergence_of_one),
    ],
)
def test_a_jaxnorm_loss_in_linear_loss(compiler: Compiler, function, of_one):
    """`linear_loss` needs no more memory than the function made for the loss that `fun` calls.

    It also has the same matmuls, and no more kernels.
    """

    def general(x, weight, labels, teacher_x, teacher_weight):
        def fun(logits, label, teacher_x):
            return of_one(logits, label, teacher_x, teacher_weight)

        return jaxnorm.linear_loss(fun, x, weight, labels, teacher_x)

    shapes = [(ROWS, 2048), (2048, V), (ROWS,), (ROWS, 2048), (2048, V)]
    operands = [
        jax.ShapeDtypeStruct(
            s, jnp.bfloat16 if len(s) > 1 else jnp.int32, sharding=compiler.sharding
        )
        for s in shapes
    ]
    memory, matmuls = [], []
    for each in (general, function):
        step = jax.jit(jax.value_and_grad(each, (0, 1)))
        program = step.lower(*operands).compile(compiler_options=CUBLAS)
        memory.append(program.memory_analysis().temp_size_in_bytes)
        matmuls.append(program.as_text().count('custom_call_target="__cublas'))
    # Each has arrays of one number per row, which XLA places differently.
    assert memory[0] <= memory[1] + 4 * 4 * ROWS
    assert matmuls[0] <= matmuls[1]


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_classes_that_are_no_multiple_of_16_bytes(compiler: Compiler, implementation):
    """The weight is padded once, before the loop. In the loop, nothing is padded or sliced."""
    options = {"classes": 50257, "implementation": implementation, "chunk": D}
    program = compiled(compiler, "mean", 3 * D, **options)
    computations = dict(_computations(program.as_text()))
    (body,) = re.findall(r"body=%?([\w.\-]+)", program.as_text())
    made = [
        (opcode, kind)
        for opcode, kind, line in computations[body]
        if opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast")
        and _elements(kind) >= D * 50257
    ]
    # The loop creates only three arrays of this size: the logits, their gradient (which a kernel or
    # a fusion computes), and the weight's gradient.
    assert len(made) == 3, made
