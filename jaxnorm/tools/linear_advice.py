"""Advice to use gated_linear or activation_linear for a linear layer after an activation."""

import functools
from collections.abc import Iterator

from jaxnorm.tools import kept_arrays
from jaxnorm.tools.kept_arrays import STACKED, Advice, Program, Value, origin, reached


def linear_layers(program: Program) -> Iterator[Advice]:
    """Recognise a linear layer after an activation, with or without dropout between them.

    On the left is such code, on the right its replacement.

    ::

        y = (silu(gate) * up) @ weight      jaxnorm.gated_linear: saves gate and up
        y = gelu(x) @ weight                jaxnorm.activation_linear: saves x

    Any elementwise function with a nonlinear primitive is an activation. The weight may be trained,
    frozen or a constant.
    """
    try:
        yield from filter(None, (_of_matmul(value, program) for value in program.values))
    finally:  # The cache's keys are arrays of this graph, which would otherwise stay in memory.
        _sources.cache_clear()


def _of_matmul(matmul: Value, program: Program) -> Advice | None:
    factors = kept_arrays.rows_and_weight(matmul)
    if factors is None:
        return None
    h = origin(factors[0])
    sources, is_nonlinear, is_alone = _sources(h)
    # Leave out random bits: the mask of dropout is recomputed from the random key, and not saved.
    arrays = [s for s in sources if s.made_by != "random_bits"]
    if not (is_nonlinear and is_alone and len(arrays) in (1, 2)):
        return None
    if not _is_for(matmul, h, sources):
        return None
    between = [v for v in program.by_origin if v not in sources and _is_between(v, sources)]
    members = program.saved_of(between)
    members += program.zeros_like(h)[: bool(members)]  # some derivatives save an array of zeros
    function = "gated_linear" if len(arrays) == 2 else "activation_linear"
    if function == "gated_linear":
        how = "replace the down projection {at} with jaxnorm.gated_linear"
        saved = "only gate and up are saved"
    else:
        how = "replace the linear layer {at} and its activation with jaxnorm.activation_linear"
        saved = "only the activation's input is saved"
    if len(arrays) < len(sources):
        how += " (its dropout goes into product=)"
    instead = sum(map(program.extra_bytes, arrays))
    return Advice(function, matmul.source, f"{how}: {saved}", members, instead, matmul.layers)


@functools.cache
def _sources(h: Value) -> tuple[dict[Value, None], bool, bool]:
    """Return three things about the elementwise operations that compute h.

    h is the first operand of a matmul, or an array from which this operand is computed.

    - The arrays of h's size from which the operations start, as the keys of a dict.
    - True if one of the operations is nonlinear.
    - True if no operand of the operations is computed by a reduction, such as the sum over a row in
      a norm or a softmax.
    """
    sources: dict[Value, None] = {}
    is_nonlinear, is_alone = False, True
    stack, seen = [h], set[Value]()
    while stack:
        value = origin(stack.pop())
        if value in seen:
            continue
        seen.add(value)
        if value.size != h.size or value.is_spread:
            is_alone &= not kept_arrays.is_reduced(value, h.size)
        elif value.made_by in kept_arrays.ELEMENTWISE and not kept_arrays.is_product(value):
            is_nonlinear |= value.made_by in kept_arrays.NONLINEAR
            stack += value.operands
        else:
            sources[value] = None
    return sources, is_nonlinear, is_alone


def _is_for(matmul: Value, h: Value, sources: dict[Value, None]) -> bool:
    """Return True if the arrays between `sources` and h are used only to compute this matmul."""

    def before(value: Value) -> list[Value]:
        made_of = [v for v in map(origin, value.operands) if v.size == h.size and not v.is_spread]
        return [v for v in made_of if v not in sources]

    def fits(user: Value) -> bool:
        return user.made_by in kept_arrays.ELEMENTWISE and _is_between(user, sources)

    inside_or_after = reached(reached([h], before), lambda v: filter(fits, v.users))
    users = kept_arrays.users_outside(inside_or_after, inside_or_after)
    return all(user is matmul or user.made_by == STACKED for user in users)


def _is_between(value: Value, sources: dict[Value, None]) -> bool:
    """Return True if an array is computed elementwise, and only from `sources`."""
    own, _, is_alone = _sources(value)
    return bool(own) and is_alone and own.keys() <= sources.keys()
