"""Advice on softmaxes: jaxnorm's saves its result alone, without exponentials and masks."""

from collections.abc import Iterator, Sequence

from jaxnorm.tools import elementwise
from jaxnorm.tools.advice import Advice, Program
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin, reached

#: Primitives that are in no other table.
PRIMITIVES = {"eq", "ge", "gt", "iota", "le", "lt", "reduce_max", "reduce_sum", "select_n"}

_COMPARISONS = ("ge", "gt", "le", "lt")


def softmaxes(program: Program) -> Iterator[Advice]:
    """Recognise a softmax whose result is saved, as it is or for the matmul after it.

    ::

        p = softmax(logits)                                      jaxnorm.softmax: saves p
        p = softmax(where(mask, logits, -inf))                   where=mask, or causal=True
        y = einsum(..., p.astype(bfloat16), v)                   dtype=bfloat16: saves that p
        y = einsum(..., p.reshape(batch, length, groups, ...))   reshape, or transpose, the logits
        p = jaxnorm.softmax(where(mask, logits, -inf))           where=mask, or causal=True

    In grouped-query attention the result is reshaped; a reshape of the logits does the same.
    """
    for value in program.saved:
        made = origin(value)
        if made.made_by == "exp":
            advice = _of_plain(made, program)
        elif made.made_by == "jaxnorm.softmax":
            advice = _of_ours(made, program)
        else:
            continue
        if advice is not None:
            yield advice


def _of_plain(exponential: Value, program: Program) -> Advice | None:
    quotient = _quotient(exponential)
    path = None if quotient is None else _to_saved(quotient, program)
    if quotient is None or path is None:
        return None
    options = []
    if path[-1].dtype != quotient.dtype:
        options.append(f"dtype={path[-1].dtype.name}")
    mask, option = _mask(exponential.operands[0], program)
    options += [option] * bool(option)
    members = program.saved_of([exponential, *mask])
    how = "replace the softmax {at} with jaxnorm.softmax"
    how += f", with {' and '.join(options)}" if options else ""
    moves = [v.made_by for v in path if v.made_by in ("reshape", "transpose")]
    if moves:
        moves = [*dict.fromkeys(moves)]
        how += f", and {' and '.join(moves)} its logits in place of its result"
    how += ": only its result is saved"
    return Advice("softmax", exponential.source, how, members, 0, exponential.layers)


def _of_ours(result: Value, program: Program) -> Advice | None:
    """Return advice on the mask of one of jaxnorm's softmaxes."""
    mask, option = _mask(result.operands[0], program)
    if not mask:
        return None
    how = f"call the softmax {{at}} with {option} in place of masked logits: no mask is saved"
    return Advice("softmax", result.source, how, mask, 0, result.layers)


def _quotient(exponential: Value) -> Value | None:
    """Return what exponentials are over their sum."""
    for user in exponential.users:
        if user.made_by == "div" and user.operands[0] is exponential:
            sums = elementwise.ancestors(user.operands[1], user.size)
            if any(v is exponential for v in sums):
                return user
    return None


def _to_saved(result: Value, program: Program) -> list[Value] | None:
    """Return the copies of a softmax's result, up to the one that is saved.

    If any but that one is used otherwise, or the softmax's axis takes part in a reshape, a softmax
    of copied logits does not have this result.
    """
    path = [result]
    while id(path[-1]) not in program.by_origin:
        users = [v for v in path[-1].users if v.made_by != STACKED]
        casts = all(v.made_by == "convert_element_type" for v in users)
        if not users or (len(users) > 1 and not casts):
            return None
        copy = next((v for v in users if id(v) in program.by_origin), users[0])
        is_move = copy.made_by in ("reshape", "transpose")
        if not (is_move or casts or copy.made_by in NAMING):
            return None
        if copy.made_by == "reshape" and copy.shape[-1:] != path[-1].shape[-1:]:
            return None
        path.append(copy)
    return path


def _mask(logits: Value, program: Program) -> tuple[Sequence[Value], str]:
    """Return what is saved for a mask of logits, and the option in its place."""
    value = origin(logits)
    if value.made_by == "sub":  # less the maximum of its row
        value = origin(value.operands[0])
    select = elementwise.uncast(value)
    if select.made_by != "select_n" or len(select.operands) != 3:
        return [], ""
    predicate = origin(select.operands[0])
    is_fill = [
        elementwise.is_spread(v) or elementwise.number(v) is not None for v in _cases(select)
    ]
    if sum(is_fill) != 1:
        return [], ""
    saved = program.saved_of([predicate])
    is_for_it = all(v is select or v.made_by in ("scan", STACKED) for v in predicate.users)
    if not saved or not is_for_it:
        return [], ""
    zeros = [
        v
        for v in program.saved
        if id(v) not in program.advised
        and elementwise.is_zeros(origin(v), select)
        and origin(v).source == select.source
    ]
    option = "causal=True" if _is_causal(predicate) else "where="
    return [*saved, *zeros[:1]], option


def _cases(select: Value) -> Sequence[Value]:
    return [origin(v) for v in select.operands[1:]]


def _is_causal(predicate: Value) -> bool:
    """Return True for one comparison of the numbers of rows with those of columns."""
    made_of = reached([predicate], lambda v: v.operands).values()
    names = [v.made_by for v in made_of]
    comparisons = [name for name in names if name in _COMPARISONS]
    return (
        len(comparisons) == 1
        and "iota" in names
        and not {"argument", "slice", "and", "or", "eq", "ne"} & {*names}
    )
