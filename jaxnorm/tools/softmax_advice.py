"""Advice on softmaxes: jaxnorm's softmax saves its result, but no exponentials and no masks."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxnorm.tools import kept_arrays, values
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin

# Numbers up to this one mask a logit. The smallest float16 number is -65504.
_MASKED = -1e4

# The largest number of elements of a mask that is compared with a causal mask.
_LARGEST = 2**24

_WHERE = "where= (weights of a row without any True are then 0)"

#: Primitives that this module recognises, in addition to `memory_advice.COMMON`.
PRIMITIVES = {"ge", "iota", "not", "reduce_max", "reduce_sum", "select_n"}


def softmaxes(program: Program) -> Iterator[Advice]:
    """Recognise a softmax whose result, or a copy of the result for a matmul, is saved.

    On the left is such code, on the right its replacement, or the option to use.

    ::

        p = softmax(logits)                                      jaxnorm.softmax: saves p
        p = softmax(where(mask, logits, -inf))                   where=mask, or causal=True
        y = einsum(..., p.astype(bfloat16), v)                   dtype=bfloat16: saves the cast p
        y = einsum(..., p.reshape(batch, length, groups, ...))   reshape, or transpose, the logits
        p = jaxnorm.softmax(where(mask, logits, -inf))           where=mask, or causal=True

    In grouped-query attention, the result is reshaped. The advice is then to reshape the logits
    instead, so that the softmax returns, and saves, the reshaped array.
    """
    finders = {"exp": _of_plain, "jaxnorm.softmax": _of_ours}
    for made in map(origin, program.saved):
        find = finders.get(made.made_by)
        advice = None if find is None else find(made, program)
        if advice is not None:
            yield advice


def _of_plain(exponential: Value, program: Program) -> Advice | None:
    quotient = _quotient(exponential)
    path = None if quotient is None else _to_saved(quotient, program)
    if quotient is None or path is None:
        return None
    logits = _logits(exponential)
    mask, option = _mask(logits, program)
    axis = _softmax_axis(quotient, logits)
    if axis is None:
        return None
    is_last = axis == len(quotient.shape) - 1
    options = [] if is_last else [f"axis={axis}"]
    if path[-1].dtype != quotient.dtype:
        options.append(f"dtype={path[-1].dtype.name}")
    moves = [*dict.fromkeys(v.made_by for v in path if v.made_by in ("reshape", "transpose"))]
    if moves and not is_last:
        return None
    if path[-1].shape[-2:] != quotient.shape[-2:] or "transpose" in moves:
        # For reshaped or transposed logits, causal=True would apply to other axes.
        option = option and _WHERE
    options += [option] * bool(option and is_last)
    members = program.saved_of([exponential, *(mask if is_last else ())])
    how = "replace the softmax {at} with jaxnorm.softmax"
    how += f", with {' and '.join(options)}" if options else ""
    if moves:
        how += f", and {' and '.join(moves)} its logits in place of its result"
    if kept_arrays.is_called_by(exponential, "flax"):
        how += " (in Flax's attention: attention_fn=jaxnorm.nnx.dot_product_attention, or linen's)"
    how += ": only its result is saved"
    return Advice("softmax", exponential.source, how, members, 0, exponential.layers)


def _logits(exponential: Value) -> Value:
    """Return the logits of a softmax, from which the row's maximum may be subtracted."""
    shifted = kept_arrays.uncast(exponential.operands[0])
    return kept_arrays.uncast(shifted.operands[0]) if shifted.made_by == "sub" else shifted


def _softmax_axis(quotient: Value, logits: Value) -> int | None:
    """Return the axis if `quotient` is the softmax of `logits` over an axis, otherwise None."""
    for axis in range(len(logits.shape))[::-1]:
        # The maximum of a row may be computed before the logits are transposed.
        source, of_source = logits, axis
        while source.made_by in ("transpose", "convert_element_type", *NAMING):
            if source.made_by == "transpose":
                of_source = source.equation.params["permutation"][of_source]
            source = source.operands[0]
        shape = values.rows_of(source.shape, [of_source])
        draws = values.draws({source: shape}, (1.0, 10.0, 1.0))
        with contextlib.suppress(values.UnknownError):
            if all(values.agree(draw(quotient), _softmax(draw(logits), axis)) for draw in draws):
                return axis
    return None


def _softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis, keepdims=True))
    return exponentials / exponentials.sum(axis, keepdims=True)


def _of_ours(result: Value, program: Program) -> Advice | None:
    """Return advice to pass a mask to one of jaxnorm's softmaxes, instead of masked logits."""
    mask, option = _mask(kept_arrays.uncast(result.operands[0]), program)
    if not mask:
        return None
    how = f"call the softmax {{at}} with {option} in place of masked logits: no mask is saved"
    return Advice("softmax", result.source, how, mask, 0, result.layers)


def _quotient(exponential: Value) -> Value | None:
    """Find the softmax: the quotient of `exponential` and its sum over a row.

    Return the softmax, or None if there is none.
    """
    for user in exponential.users:
        is_quotient = user.made_by == "div" and user.operands[0] is exponential
        if is_quotient and exponential in kept_arrays.ancestors(user.operands[1], user.size):
            return user
    return None


def _to_saved(result: Value, program: Program) -> list[Value] | None:
    """Return the chain of arrays that leads from a softmax's result to its saved copy.

    Each array of the chain is a cast, a reshape or a transpose of the array before it. The advice
    is to cast, reshape or transpose the logits instead, so that the softmax itself returns the
    saved array. This is impossible if other code uses an array of the chain, or if a reshape
    changes the softmax's axis. The result is then None.
    """
    path = [result]
    while path[-1] not in program.by_origin:
        users = [v for v in path[-1].users if v.made_by != STACKED]
        casts = all(v.made_by == "convert_element_type" for v in users)
        if not users or (len(users) > 1 and not casts):
            return None
        copy = next((v for v in users if v in program.by_origin), users[0])
        is_move = copy.made_by in ("reshape", "transpose")
        if not (is_move or casts or copy.made_by in NAMING):
            return None
        if copy.made_by == "reshape" and copy.shape[-1:] != path[-1].shape[-1:]:
            return None
        path.append(copy)
    return path


def _mask(select: Value, program: Program) -> tuple[Sequence[Value], str]:
    """Return the arrays that are saved only for a mask of logits, and the option in its place.

    The option is "where=" or "causal=True", or "" if the logits are not masked.
    """
    if select.made_by != "select_n" or len(select.operands) != 3:
        return [], ""
    predicate, *cases = map(origin, select.operands)
    numbers = [kept_arrays.number(v) for v in cases]
    fills = [i for i, n in enumerate(numbers) if n is not None and n <= _MASKED]
    if len(fills) != 1:
        return [], ""
    saved = program.saved_of([predicate])
    is_for_it = all(v is select or v.made_by in ("scan", STACKED) for v in predicate.users)
    if not saved or not is_for_it:
        return [], ""
    zeros = [v for v in program.zeros_like(select) if origin(v).source == select.source]
    option = "causal=True" if _is_causal(predicate, fills == [1]) else _WHERE
    return [*saved, *zeros[:1]], option


def _is_causal(mask: Value, is_inverted: bool) -> bool:
    """Return True for a causal mask, such as `jnp.tril` or the inverse of ``jnp.triu(.., 1)``.

    `is_inverted` is True if the mask is True where logits are masked.
    """
    *_, rows, columns = (1, *mask.shape)
    if rows * columns > _LARGEST:
        return False
    draw = values.Draw({})
    with contextlib.suppress(values.UnknownError):
        found = draw(mask) ^ is_inverted
        is_one = not draw.drawn and found.size == rows * columns
        return is_one and np.array_equal(found.reshape(rows, columns), np.tri(rows, columns))
    return False
