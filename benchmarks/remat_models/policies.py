"""Compares MaxText's policies for Llama with auto_remat, which may save equally many bytes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from benchmarks import language_models
from benchmarks.language_models import NAMES, Params
from benchmarks.models import MODELS
from benchmarks.remat_models import language
from benchmarks.remat_models.measure import operations, types
from benchmarks.remat_models.parts import Array, Program

HEAD = (
    "| policy | saved per layer | matmuls that run again | `auto_remat` in as many bytes | "
    "matmuls that run again |\n|---|---:|---:|---:|---:|"
)
POLICIES = ("none", *NAMES)


def _program(policy: str) -> Program:
    """Return the program of Llama with a policy. The loss is computed without logits."""
    model = language.model("bfloat16", "llama-1b", policy)

    def loss(params: Params, tokens: Array) -> Array:
        x = params["embedding"].astype(model.dtype)[tokens[:, :-1]]
        return jnp.mean(jnp.square(language_models.llama(model, params, x).astype(jnp.float32)))

    return dataclasses.replace(language.of_model(model), loss=loss)


def line(policy: str) -> str:
    """Return the line of a policy: "none" or a key of `NAMES`.

    The budget of auto_remat is the sum of two numbers of bytes. The first is what the policy saves
    in the scan over layers, plus 1 % for the statistics of norms, which policies by name recompute.
    The second is what auto_remat saves outside of the scan.
    """
    plain, program = _program("none"), _program(policy)
    given = types(plain)
    layers = MODELS["llama-1b"].layers

    def saved(loss: Callable[..., Any]) -> tuple[int, int]:
        """Return two numbers of bytes: saved in the scan over layers, and saved outside of it."""
        rows = jaxnorm.memory_report(loss, *given).rows
        inside = sum(row.bytes for row in rows if row.shape[0] == layers)
        return inside, sum(row.bytes for row in rows) - inside

    def matmuls(loss: Callable[..., Any]) -> int:
        return operations(jax.grad(loss), *given)["dot_general"]

    def size(loss: Callable[..., Any]) -> str:
        return f"{saved(loss)[0] / 2 / program.activation / layers:.1f}"

    without_budget = jaxnorm.auto_remat(plain.loss)
    budget = int(1.01 * saved(program.loss)[0]) + saved(without_budget)[1]
    auto = jaxnorm.auto_remat(plain.loss, budget=budget)
    # Each gradient has its own reference, because JAX leaves unused matmuls in its gradients, and
    # auto_remat does not.
    again = (matmuls(program.loss) - matmuls(plain.loss)) // layers
    of_auto = (matmuls(auto) - matmuls(without_budget)) // layers
    name = policy.replace("maxtext ", "MaxText's ")
    return f"| {name} | {size(program.loss)} | {again} | {size(auto)} | {of_auto} |"


def table() -> str:
    """Return the table of all policies, in Markdown."""
    return "\n".join([HEAD, *map(line, POLICIES)])
