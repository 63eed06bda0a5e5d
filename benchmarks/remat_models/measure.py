"""The measured sizes of the models, and the figures of the table."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

import jaxnorm
from benchmarks.remat_models import images, language
from benchmarks.remat_models.parts import Program


@dataclasses.dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
      framework: the library that the model is written in.
      build: a function of a dtype and sizes, which returns the program.
      real: sizes of a published model, whose arguments are traced and never allocated.
      small: sizes that replace those of `SMALL` when the model runs on a CPU.
      goal: the maximum number of activations that a layer may save with auto_remat.
    """

    framework: str
    build: Callable[..., Program]
    real: dict[str, Any]
    small: dict[str, Any] = dataclasses.field(default_factory=dict)
    goal: float | None = None

    def program(self, dtype: str = "bfloat16", **sizes: Any) -> Program:
        return self.build(dtype, **{**self.real, **sizes})

    def of_layers(self, layers: int) -> Program:
        return self.program(layers=layers)

    def small_program(self, dtype: str = "float32") -> Program:
        sizes = {name: SMALL.get(name, size) for name, size in self.real.items()}
        return self.program(dtype, **{**sizes, **self.small})


#: Sizes at which a model runs on a CPU in a second.
SMALL: dict[str, Any] = {
    "layers": 2, "width": 32, "hidden": 64, "heads": 4, "kv_heads": 2, "head": 8, "batch": 2,
    "vocabulary": 61, "seq": 16, "window": 8, "attention": (4, 2, 8), "experts": (4, 2, 32),
    "iterations": 2, "inner": 64, "state": 8, "chunk": 8, "classes": 11, "size": 16,
}  # fmt: skip
CASES = {
    "GPT-2": Case(
        "plain JAX",
        functools.partial(language.plain, name="gpt2-small"),
        {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "hidden": 3072}
        | {"vocabulary": 50257, "batch": 16, "seq": 1024},
        {"kv_heads": 4},
        goal=10.1,
    ),
    "BERT base": Case(
        "Flax linen",
        language.bert,
        {"layers": 12, "width": 768, "heads": 12, "hidden": 3072}
        | {"vocabulary": 30522, "batch": 32, "seq": 512},
    ),
    "Llama 3.2 1B": Case(
        "plain JAX",
        functools.partial(language.plain, name="llama-1b"),
        {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192}
        | {"vocabulary": 128256, "batch": 4, "seq": 2048},
        goal=12.6,
    ),
    "Qwen 3 8B": Case(
        "plain JAX",
        functools.partial(language.plain, name="llama-1b-qk"),
        {"layers": 36, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 12288}
        | {"vocabulary": 151936, "batch": 1, "seq": 4096},
        goal=12.8,
    ),
    "Gemma 2 2B": Case(
        "Flax linen",
        language.gemma_2,
        {"layers": 26, "width": 2304, "heads": 8, "kv_heads": 4, "head": 256, "hidden": 9216}
        | {"vocabulary": 256000, "window": 4096, "batch": 1, "seq": 8192},
        goal=13.6,
    ),
    "Mixtral 8x7B": Case(
        "Flax linen",
        language.mixtral,
        {"layers": 32, "width": 4096, "attention": (32, 8, 128), "experts": (8, 2, 14336)}
        | {"vocabulary": 32000, "batch": 1, "seq": 4096},
    ),
    "Mamba 2 130M": Case(
        "Flax linen",
        language.mamba_2,
        {"layers": 24, "width": 768, "inner": 1536, "head": 64, "state": 128, "chunk": 256}
        | {"vocabulary": 50280, "batch": 16, "seq": 1024},
    ),
    "ViT-B/16": Case(
        "equinox",
        images.vit,
        {"layers": 12, "width": 768, "heads": 12, "hidden": 3072, "classes": 1000}
        | {"patch": 16, "batch": 128, "size": 224},
        {"patch": 4},
    ),
    "DiT-XL/2": Case(
        "Flax nnx",
        images.dit,
        {"layers": 28, "width": 1152, "heads": 16, "hidden": 4608, "channels": 4}
        | {"patch": 2, "batch": 32, "size": 32},
        {"size": 8},
        goal=11.4,
    ),
    "U-Net (DDPM)": Case(
        "Flax linen",
        images.u_net,
        {"channels": (128, 256, 256, 512), "blocks": 2, "groups": 32, "heads": 8}
        | {"batch": 64, "size": 64},
        {"channels": (8, 16), "blocks": 1, "groups": 4, "heads": 2, "size": 8},
    ),
    "T5 1.1 base": Case(
        "Flax linen",
        language.t5,
        {"layers": 12, "width": 768, "heads": 12, "head": 64, "hidden": 2048}
        | {"vocabulary": 32128, "batch": 16, "seq": 512},
    ),
    "mHC 1B": Case(
        "Flax linen",
        language.hyper_connections,
        {"layers": 16, "width": 2048, "attention": (32, 8, 64), "hidden": 8192, "streams": 4}
        | {"iterations": 20, "vocabulary": 128256, "batch": 4, "seq": 2048},
    ),
}


def types(program: Program) -> tuple[Any, Any]:
    """Return the types of the parameters and of the batch."""
    key = jax.random.key(0)
    return jax.eval_shape(program.init, key), jax.eval_shape(program.batch, key)


#: The maximum number of matrices of probabilities that attention without a kernel may save.
MATRICES = 1.7

#: Prefixes of the names of primitives that must not run twice.
COSTLY = (
    "conv_general_dilated", "cumsum", "dot_general", "pallas_call", "ragged_dot", "random_bits",
    "scan", "sort", "threefry", "top_k", "while",
)  # fmt: skip


def operations(f: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Count the costly operations of a traced program; in a scan, once for each iteration."""
    found: collections.Counter[str] = collections.Counter()

    def visit(jaxpr: Any, runs: int) -> None:
        for e in jaxpr.eqns:
            name = e.primitive.name
            inside = runs * e.params["length"] if name == "scan" else runs
            if name.startswith(COSTLY) and not _is_outer_product(e):
                found[name] += inside
            for inner in jaxprs_in_params(e.params):
                visit(getattr(inner, "jaxpr", inner), inside)

    visit(jax.make_jaxpr(f)(*args).jaxpr, 1)
    return found


def _is_outer_product(equation: Any) -> bool:
    """Return True for a matmul without a sum, which XLA computes as an elementwise product."""
    if equation.primitive.name != "dot_general":
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    return all(equation.invars[0].aval.shape[i] == 1 for i in contracted)


def repeated(program: Program) -> dict[str, int]:
    """Return the numbers of costly operations that auto_remat adds to the gradient, by name."""
    losses = jaxnorm.auto_remat(program.loss), program.loss
    ours, plain = (operations(jax.grad(f), *types(program)) for f in losses)
    return dict(ours - plain)


def per_layer(
    build: Callable[[int], Program], remat: Callable[[Any], Any] = lambda f: f
) -> tuple[float, float]:
    """Return the number of activations and of matrices that a layer saves.

    They are counted in arrays of 16-bit elements: activations of tokens x width, and matrices of
    attention's probabilities. Two models, which differ by two layers, are compared.

    Args:
      build: a function of the number of layers.
      remat: `auto_remat`, or the identity.
    """

    def sizes(program: Program) -> tuple[int, int]:
        rows = jaxnorm.memory_report(remat(program.loss), *types(program)).rows
        matrices = sum(row.bytes for row in rows if program.is_matrix(row.shape))
        return sum(row.bytes for row in rows) - matrices, matrices

    fewer, more = build(2), build(4)
    activations, matrices = ((a - b) / 2 / 2 for a, b in zip(sizes(more), sizes(fewer)))
    return activations / more.activation, matrices / (more.matrix or 1)


HEAD = (
    "| model | library | saved by JAX, GiB | with `auto_remat` | recomputation | saved per layer | "
    "with `auto_remat` |\n|---|---|---:|---:|---:|---:|---:|"
)


def line(name: str) -> str:
    """Return a model's line of the table."""
    case = CASES[name]
    program = case.program()
    plan = jaxnorm.remat_plan(program.loss, *types(program))

    def of_layer(*remat: Callable[[Any], Any]) -> str:
        if not program.activation:
            return "-"
        activations, matrices = per_layer(case.of_layers, *remat)
        return f"{activations:.1f}" + (f" + {matrices:.1f} matrices" if program.matrix else "")

    cells = [
        name,
        case.framework,
        f"{plan.default / 2**30:.2f}",
        f"{plan.total / 2**30:.2f}",
        f"{plan.recompute:.1%}",
        of_layer(),
        of_layer(jaxnorm.auto_remat),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table of all models, in Markdown."""
    return "\n".join([HEAD, *map(line, CASES)])
