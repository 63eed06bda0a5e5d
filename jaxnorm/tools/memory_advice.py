"""Advice to use jaxnorm's functions, or `jax.checkpoint`, so that a program saves fewer arrays.

A recogniser is a function that finds code of a certain kind in the graph of `kept_arrays`, by the
primitives that make and use an array. Its docstring shows such code. `RECOGNISERS` lists the
recognisers in the order in which they run, with the primitives that they depend on. If a new
version of JAX renames one of these primitives, these recognisers must be updated.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxnorm.tools import (
    distillation_advice,
    kept_arrays,
    linear_advice,
    loss_advice,
    norm_advice,
    softmax_advice,
)
from jaxnorm.tools.kept_arrays import NAMING, Advice, Graph, Program, Recogniser, Value, origin


def saved_twice(program: Program) -> Iterator[Advice]:
    """Recognise, in a scan, a reshaped or cast copy that is saved in addition to its original.

    On the left is such code, on the right what it saves.

    ::

        y = heads.reshape(batch, length, -1) @ weight    heads, and the reshaped copy for the matmul
        y = wide.astype(jnp.bfloat16) @ weight           wide, and the cast copy for the matmul

    Outside of a loop, XLA recomputes such a copy.
    """
    for value in program.saved:
        made = origin(value)
        if made.layers > 1 and made.made_by in kept_arrays.COPYING:
            before = _original(made, program)
            if before is not None:
                shown = f"{before.dtype.name}[{','.join(map(str, before.shape))}]"
                template = (
                    f"the {made.made_by} {{at}} is saved beside {shown} of "
                    f"{before.source.partition(' ')[0] or 'an argument'}, of which it is made; put "
                    "it and what takes it into one jax.checkpoint"
                )
                yield Advice(
                    "jax.checkpoint", made.source, template, [value], 0, made.layers, made.made_by
                )


def _original(copy: Value, program: Program) -> Value | None:
    """Find the saved array that was reshaped or cast to `copy`; return None if there is none."""
    while copy.made_by in kept_arrays.COPYING:
        copy = origin(copy.operands[0])
        if id(copy) in program.by_origin:
            return copy
    return None


class Recognised(NamedTuple):
    """A recogniser, and the names of the primitives that it depends on."""

    find: Recogniser
    primitives: frozenset[str]


_COMMON = {*kept_arrays.COPYING, *kept_arrays.ELEMENTWISE, *NAMING, "broadcast_in_dim", "scan"}

#: All recognisers, in the order in which they run. An array gets the first advice found for it.
RECOGNISERS = (
    Recognised(linear_advice.linear_layers, frozenset({*_COMMON, "dot_general", "random_bits"})),
    Recognised(norm_advice.gated_sums, frozenset({*_COMMON, "reduce_sum"})),
    Recognised(norm_advice.norms, frozenset({*_COMMON, "reduce_sum"})),
    Recognised(norm_advice.activations, frozenset({*_COMMON, "reduce_sum"})),
    Recognised(norm_advice.rotations, frozenset({*_COMMON, *norm_advice.STEPS})),
    Recognised(loss_advice.losses, frozenset({*_COMMON, *loss_advice.PRIMITIVES})),
    Recognised(
        distillation_advice.divergences,
        frozenset({*_COMMON, *distillation_advice.PRIMITIVES}),
    ),
    Recognised(softmax_advice.softmaxes, frozenset({*_COMMON, *softmax_advice.PRIMITIVES})),
    Recognised(saved_twice, frozenset(_COMMON)),
)


def advice(graph: Graph) -> dict[int, tuple[Advice, int]]:
    """Return a dict: for each saved array, the advice that frees it and the number of freed bytes.

    The keys are the identities (`id`) of the arrays. Arrays that no advice frees are not in the
    dict. The number of bytes is at most the size of the array.
    """
    program = Program(graph)
    found: dict[int, tuple[Advice, int]] = {}
    try:
        for recognised in RECOGNISERS:
            for one in recognised.find(program):
                found |= _shared_out(one, program)
                program.advised.update(found)
    finally:  # The caches' keys are arrays of this graph, which would otherwise stay in memory.
        linear_advice.clear_caches()
        kept_arrays.is_spread.cache_clear()
    return found


def _shared_out(advice: Advice, program: Program) -> dict[int, tuple[Advice, int]]:
    """Return, for each array that `advice` frees, the advice and the number of freed bytes.

    The number of bytes is the size of the array. If the program then saves other arrays instead,
    their bytes are deducted from the largest freed array. If they are more than the size of that
    array, the rest is deducted from the next largest one, and so on.
    """
    members = [v for v in advice.members if id(v) not in program.advised]
    members = sorted({id(v): v for v in members}.values(), key=lambda v: -v.bytes)
    instead = advice.instead
    if sum(v.bytes for v in members) <= instead:
        return {}
    found = {}
    for value in members:
        in_its_place = min(instead, value.bytes)
        instead -= in_its_place
        if value.bytes > in_its_place:
            found[id(value)] = advice, value.bytes - in_its_place
    return found
