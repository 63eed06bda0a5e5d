"""Build and lower programs, and iterate over all equations of a traced program."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core


def text_for_cuda(function: Callable[..., Any], *operands: Any) -> str:
    """Return the text of the function's program, lowered for an NVIDIA GPU."""
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(function: Callable[..., Any], *operands: Any) -> int:
    """Return the number of Mosaic kernels in the function's program for an NVIDIA GPU."""
    return text_for_cuda(function, *operands).count("stablehlo.custom_call @mosaic_gpu")


def results_of_kernels(text: str) -> list[str]:
    """Return the result types of each Mosaic kernel in a program's text."""
    return [line.rpartition("->")[2] for line in text.splitlines() if "@mosaic_gpu" in line]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr, including those of nested jaxprs.

    With ``jax_remat3``, `jax.checkpoint` is a high-level primitive. `jaxprs_in_params` does not
    find its jaxpr, so this function takes the jaxpr from the primitive.
    """
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
        high_level = getattr(equation.params.get("_prim"), "jaxpr", None)
        if high_level is not None:
            yield from equations(high_level)


def primitives(jaxpr: Any) -> list[str]:
    """Return the primitive name of each equation, in order."""
    return [equation.primitive.name for equation in equations(jaxpr)]


def names(jaxpr: Any) -> list[str]:
    """Return the names that `checkpoint_name` gives to arrays in a jaxpr.

    In JAX's mode `jax_remat3`, `checkpoint_name` is a high-level primitive. The name is then an
    attribute of the primitive, and not a parameter of the equation.
    """
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "name":
            found.append(equation.params["name"])
        elif isinstance(name := getattr(equation.params.get("_prim"), "name", None), str):
            found.append(name)
    return found
