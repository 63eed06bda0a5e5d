"""Advice to use jaxnorm's functions, or `jax.checkpoint`, so that a program saves fewer arrays.

A recogniser is a function that finds code of a certain kind in the graph of `kept_arrays`, by the
primitives that make and use an array. Its docstring shows such code. `RECOGNISERS` lists the
recognisers in the order in which they run, with the primitives that they depend on. If a new
version of JAX renames one of these primitives, these recognisers must be updated.
"""

from collections.abc import Callable, Iterator

from jaxnorm.tools import (
    kept_arrays,
    linear_advice,
    loss_advice,
    norm_advice,
    softmax_advice,
)
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value

# Norms of jaxnorm that save their only result, whose dtype is the argument ``dtype``.
_NORMS = {"jaxnorm.layer_norm", "jaxnorm.rms_norm", "jaxnorm.rms_norm_rope"}


def cast_norms(program: Program) -> Iterator[Advice]:
    """Recognise, in a scan, a norm's result that is saved and is cast to fewer bits by each user.

    On the left is such code, on the right what it saves.

    ::

        y = jaxnorm.rms_norm(wide, scale)                y
        z = y.astype(jnp.bfloat16) @ weight              each cast copy
    """
    for y, saved in program.by_origin.items():
        if y.made_by not in _NORMS or y.layers == 1:
            continue
        casts = [*_direct_users(y)]
        dtypes = {cast.dtype for cast in casts}
        narrow = min(dtypes, key=lambda dtype: dtype.itemsize, default=y.dtype)
        is_cast = all(cast.made_by == "convert_element_type" for cast in casts)
        if is_cast and len(dtypes) == 1 and narrow.itemsize < y.dtype.itemsize:
            template = (
                f"give the call {{at}} dtype={narrow.name}, to which all its users cast: only this "
                "result is saved, and gradients are computed from it"
            )
            instead = saved.bytes * narrow.itemsize // y.dtype.itemsize
            members = [saved, *program.saved_of(casts)]
            function = y.made_by.removeprefix("jaxnorm.")
            yield Advice(function, y.source, template, members, instead, y.layers)


def _direct_users(value: Value) -> Iterator[Value]:
    """Yield the users of a value that do more than name it, copy it or stack it."""
    for user in value.users:
        if user.made_by in NAMING:
            yield from _direct_users(user)
        elif user.made_by != STACKED:
            yield user


def saved_twice(program: Program) -> Iterator[Advice]:
    """Recognise, in a scan, a reshaped or cast copy that is saved in addition to its original.

    On the left is such code, on the right what it saves.

    ::

        y = heads.reshape(batch, length, -1) @ weight    heads, and the reshaped copy for the matmul
        y = wide.astype(jnp.bfloat16) @ weight           wide, and the cast copy for the matmul

    Outside of a loop, XLA recomputes such a copy.
    """
    for value in program.saved:
        made, *sources = kept_arrays.copied(value)
        before = next((v for v in sources if v in program.by_origin), None)
        if made.layers > 1 and before is not None:
            shown = f"{before.dtype.name}[{','.join(map(str, before.shape))}]"
            template = (
                f"the {made.made_by} {{at}} is saved beside {shown} of "
                f"{before.source.partition(' ')[0] or 'an argument'}, of which it is made; put "
                "it and what takes it into one jax.checkpoint"
            )
            yield Advice(
                "jax.checkpoint", made.source, template, [value], 0, made.layers, made.made_by
            )


#: The primitives that all recognisers depend on.
COMMON = {*kept_arrays.COPYING, *kept_arrays.ELEMENTWISE, *NAMING, "broadcast_in_dim", "scan"}

#: All recognisers, in the order in which they run. An array gets the first advice found for it.
#: Each recogniser is mapped to the primitives that it depends on in addition to `COMMON`.
RECOGNISERS: dict[Callable[[Program], Iterator[Advice]], set[str]] = {
    linear_advice.linear_layers: {"dot_general", "random_bits"},
    norm_advice.norms: {"reduce_sum"},
    norm_advice.activations: {"reduce_sum"},
    loss_advice.losses: loss_advice.PRIMITIVES,
    softmax_advice.softmaxes: softmax_advice.PRIMITIVES,
    cast_norms: set(),
    saved_twice: set(),
}


def advice(program: Program) -> dict[Value, tuple[Advice, int]]:
    """Return a dict: for each saved array, the advice that frees it and the number of freed bytes.

    Arrays that no advice frees are not in the dict. The number of bytes is at most the size of the
    array.
    """
    found: dict[Value, tuple[Advice, int]] = {}
    for find in RECOGNISERS:
        for one in find(program):
            found |= _shared_out(one, program)
            program.advised.update(found)
    return found


def _shared_out(advice: Advice, program: Program) -> dict[Value, tuple[Advice, int]]:
    """Return, for each array that `advice` frees, the advice and the number of freed bytes.

    The number of bytes is the size of the array. If the program then saves other arrays instead,
    their bytes are deducted from the largest freed array. If they are more than the size of that
    array, the rest is deducted from the next largest one, and so on.
    """
    members = [v for v in dict.fromkeys(advice.members) if v not in program.advised]
    members.sort(key=lambda v: -v.bytes)
    instead = advice.instead
    if sum(v.bytes for v in members) <= instead:
        return {}
    found = {}
    for value in members:
        in_its_place = min(instead, value.bytes)
        instead -= in_its_place
        if value.bytes > in_its_place:
            found[value] = advice, value.bytes - in_its_place
    return found
