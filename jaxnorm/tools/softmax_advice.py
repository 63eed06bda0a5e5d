"""Advice on softmaxes: jaxnorm's softmax saves its result, but no exponentials and no masks."""

from collections.abc import Iterator, Sequence

from jaxnorm.tools import kept_arrays
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin

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
    options = []
    if path[-1].dtype != quotient.dtype:
        options.append(f"dtype={path[-1].dtype.name}")
    mask, option = _mask(exponential.operands[0], program)
    if path[-1].shape[-2:] != quotient.shape[-2:] or any(v.made_by == "transpose" for v in path):
        # For reshaped or transposed logits, causal=True would apply to other axes.
        option = option and "where="
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
    """Return advice to pass a mask to one of jaxnorm's softmaxes, instead of masked logits."""
    mask, option = _mask(result.operands[0], program)
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


def _mask(logits: Value, program: Program) -> tuple[Sequence[Value], str]:
    """Return the arrays that are saved only for a mask, and the option that replaces the mask.

    The option is "where=" or "causal=True", or "" if the logits are not masked.
    """
    value = origin(logits)
    if value.made_by == "sub":  # The softmax subtracts the maximum of the row.
        value = origin(value.operands[0])
    select = kept_arrays.uncast(value)
    if select.made_by != "select_n" or len(select.operands) != 3:
        return [], ""
    predicate, *cases = map(origin, select.operands)
    fills = [v for v in cases if v.is_spread or kept_arrays.number(v) is not None]
    if len(fills) != 1:
        return [], ""
    saved = program.saved_of([predicate])
    is_for_it = all(v is select or v.made_by in ("scan", STACKED) for v in predicate.users)
    if not saved or not is_for_it:
        return [], ""
    zeros = [v for v in program.zeros_like(select) if origin(v).source == select.source]
    option = "causal=True" if _is_causal(predicate, fills[0] is cases[1]) else "where="
    return [*saved, *zeros[:1]], option


def _is_causal(mask: Value, is_inverted: bool) -> bool:
    """Return True for a causal mask, such as `jnp.tril` or the inverse of ``jnp.triu(.., 1)``.

    `is_inverted` is True if the mask is True where logits are masked.
    """
    shape = mask.shape[-2:]
    while mask.made_by in ("broadcast_in_dim", "select_n", "not", "reshape"):
        if mask.made_by == "select_n":
            numbers = [kept_arrays.number(v) for v in mask.operands[1:]]
            if {*numbers} != {0, 1}:
                return False
            is_inverted ^= numbers[0] == 1
        is_inverted ^= mask.made_by == "not"
        mask = origin(mask.operands[0])
        if mask.shape[-2:] != shape:  # The mask's rows and columns are not its last two axes.
            return False
    if mask.made_by != "ge" or is_inverted:
        return False
    rows, columns = map(origin, mask.operands)
    while rows.made_by == "add" and kept_arrays.number(rows.operands[1]) == 0:
        rows = origin(rows.operands[0])
    axes = [v.equation.params["dimension"] for v in (rows, columns) if v.made_by == "iota"]
    return axes == [len(mask.shape) - 2, len(mask.shape) - 1]
