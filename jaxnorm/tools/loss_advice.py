"""Advice on cross-entropies of integer labels, with or without the linear layer before them.

A cross-entropy is recognised in the traced program by two features: the logarithm of a sum of
exponentials over a row, and the selection of an element of that row, by a gather or by a
multiplication with a one-hot array.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from jaxnorm.tools import kept_arrays, values
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin, reached

_FUNCTION = "softmax_cross_entropy_with_integer_labels"
# Maps a loss that takes logits to the loss that also includes the linear layer before it.
_LINEAR = {
    _FUNCTION: "linear_softmax_cross_entropy",
    "log_prob_and_entropy": "linear_log_prob_and_entropy",
}

# Primitives of the elementwise operations in a cross-entropy. The operands are logits, or logits
# and an array with one number per row.
_STEPS = {"convert_element_type", "div", "eq", "exp", "log", "mul", "neg", "stop_gradient", "sub"}

# Primitives of the elementwise operations of a softcap, and of its derivative.
_OF_CAPS = {
    "convert_element_type", "div", "integer_pow", "mul", "neg", "one_minus_square", "square", "sub",
    "tanh", "add", *NAMING,
}  # fmt: skip

# Primitives of a weighted sum. The weights must not depend on a differentiated argument.
_PRODUCTS = {"mul", "select_n"}
_SUMS = {
    "add", "add_any", "convert_element_type", "neg", "reduce_sum", "reshape", "scan", "squeeze",
    "sub", STACKED, *NAMING,
}  # fmt: skip

# Number of elements for which a softcap is evaluated. It is no size of an array in a model.
_ELEMENTS = 61

# Scales that differ less from 1 differ because numbers in the program are rounded to float32.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)

#: Primitives that this module recognises, in addition to `memory_advice.COMMON`.
PRIMITIVES = {
    "argmax", "dot_general", "gather", "iota", "one_minus_square", "reduce_max", "reduce_sum",
    "slice",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Loss:
    """A cross-entropy, or a log-probability and entropy, that was found in a program.

    Attributes:
      logits: the logits, before a softcap is applied and before they are cast.
      inside: the arrays, as large as the logits, that are computed from the logits and used only by
        the loss.
      used_by: all arrays that the loss computes from the logits, and its result.
      results: the losses of the rows, or their log-probabilities.
      source: the user's line that computes the loss.
      ours: name of jaxnorm's function that computes the loss; None for a loss in plain JAX.
      options: text of the advice about the softcap; "" if there is none.
    """

    logits: Value
    inside: Sequence[Value]
    used_by: set[Value]
    results: Sequence[Value]
    source: str
    ours: str | None
    options: str = ""


def losses(program: Program) -> Iterator[Advice]:
    """Recognise a loss of integer labels, with or without the linear layer before it.

    The code looks like this.

    ::

        logits = x @ weight                                      or with a bias, a cast, a slice
        logits = cap * tanh(logits / cap)                        optional: logit_softcap=cap
        logp = log_softmax(logits)                               or logsumexp, or log(softmax(..))
        loss = -take_along_axis(logp, labels, -1)                or a product with one_hot(labels)
        loss = jaxnorm.log_prob_and_entropy(logits, labels)      or another function of jaxnorm's

    If a linear layer computes the logits, the advice is to use linear_softmax_cross_entropy. It
    saves the gradients of x and weight (if they are trained) instead of logits. Otherwise, the
    advice is to use softmax_cross_entropy_with_integer_labels, which saves only the logits.
    """
    for loss in _found(program):
        found = _of_logits(loss, program), _of_linear(loss, program)
        yield max(filter(None, found), key=attrgetter("saves"))


def _of_logits(loss: Loss, program: Program) -> Advice:
    """Return advice to use jaxnorm's loss that takes logits.

    If the program casts the logits (for example to float32), jaxnorm's loss saves only the logits
    before the cast.
    """
    function = loss.ours or _FUNCTION
    dtype = loss.logits.dtype.name
    how = f"replace the loss {{at}} with jaxnorm.{function}{loss.options}"
    if loss.ours is not None:
        when = f"uncapped{loss.options}" if loss.options else "before they are cast"
        how = f"give the call {{at}} its logits {when}"
    how += f": only the {dtype} logits are saved"
    instead = program.extra_bytes(loss.logits)
    return Advice(
        function, loss.source, how, program.saved_of(loss.inside), instead, loss.logits.layers
    )


# -------------------------------------------------------------------------------- which losses


def _found(program: Program) -> Iterator[Loss]:
    done: set[Value] = set()
    for value in map(origin, program.saved):
        loss = _ours(value, program) or _plain(value, program)
        if loss is not None and loss.logits not in done:
            done.add(loss.logits)
            yield loss


def _ours(value: Value, program: Program) -> Loss | None:
    """Find the call of a jaxnorm loss that takes `value` as its logits.

    Return that call, or None if there is none.
    """
    for user in kept_arrays.users(value):
        name = user.made_by.removeprefix("jaxnorm.")
        if name in _LINEAR and user.operands and origin(user.operands[0]) is value:
            logits = kept_arrays.uncast(value)
            inside = [] if logits is value else [value]
            casts = kept_arrays.chain(value, logits)
            calls = [v for v in kept_arrays.users(value) if v.made_by == user.made_by]
            used_by = {*casts, *calls} - {logits}
            return _uncapped(Loss(logits, inside, used_by, calls, user.source, name), program)
    return None


def _plain(value: Value, program: Program) -> Loss | None:
    """Find a loss that is written in plain JAX; `value` must be the exponentials of its logits.

    Return None if `value` does not belong to such a loss.
    """
    if value.made_by != "exp":
        return None
    shifted = origin(value.operands[0])
    is_shifted = shifted.made_by == "sub" and shifted.operands[1].is_spread
    logits = kept_arrays.uncast(shifted.operands[0] if is_shifted else shifted)
    inside = _inside(logits)
    found = _until_result(logits, inside, program) if value in inside else None
    if found is None:
        return None
    inside += _one_hots([logits, *inside])
    return _uncapped(Loss(logits, inside, *found, value.source, None), program)


def _until_result(
    logits: Value, inside: Sequence[Value], program: Program
) -> tuple[set[Value], Sequence[Value]] | None:
    """Find the array that is the cross-entropy of each row, or its log-probability.

    Return `Loss.used_by` and `Loss.results`, if the program uses the arrays that are computed from
    the logits for nothing else. Otherwise, return None.
    """
    classes = logits.shape[-1]
    rows = logits.size // max(classes, 1)
    after = kept_arrays.reached(
        [logits, *inside],
        lambda v: [t for t in v.users if t.size in (rows, logits.size) and t in program.live],
    )
    draws = values.draws({logits: values.rows_of(logits.shape, [len(logits.shape) - 1])})
    for result in after:
        if result.size != rows or not _is_cross_entropy(result, logits, draws):
            continue
        before = kept_arrays.reached([result], lambda v: [o for o in v.operands if o in after])
        made_of = [v for v in before if v is not result and v is not logits]
        if kept_arrays.are_used_only_by(made_of, before, program, ("argmax",)):
            return {*before} - {logits}, [result]
    return None


def _is_cross_entropy(result: Value, logits: Value, draws: Sequence[values.Draw]) -> bool:
    """Return True if `result` is the cross-entropy of each row, or its log-probability."""
    with contextlib.suppress(values.UnknownError):
        found = [draw(result).ravel() for draw in draws]
        drawn = draws[0].drawn.items()
        for label in [int(a.flat[0]) for v, a in drawn if np.issubdtype(v.dtype, np.integer)]:
            rows = [draw.arrays[logits].reshape(-1, logits.shape[-1]) for draw in draws]
            if not 0 <= label < logits.shape[-1]:
                continue
            # The logits are small enough for their exponentials.
            losses = [np.log(np.exp(z).sum(-1)) - z[:, label] for z in rows]
            for sign in (1, -1):
                pairs = zip(found, losses)
                if all(y.size == a.size and values.agree(y, sign * a) for y, a in pairs):
                    return True
    return False


def _uncapped(loss: Loss, program: Program) -> Loss:
    """Extend a loss by the operations on its logits that are options of jaxnorm's losses.

    These are the softcap ``cap * tanh(logits / cap)`` and a multiplication by a number. If there is
    no such operation, or if code outside the loss uses its result, the loss is returned unchanged.
    """
    sliced = [loss.logits] * _is_slice(loss.logits)
    changed = sliced[0].operands[0] if sliced else loss.logits
    logits, factors = factors_of(changed)
    cap, scale = None, float(np.prod(factors))
    if logits.made_by == "tanh":
        logits, inverses = factors_of(kept_arrays.uncast(logits.operands[0]))
        cap, scale = scale, scale * float(np.prod(inverses))
    if logits is kept_arrays.uncast(changed):
        return loss
    draws = values.draws({logits: (1,) * (len(logits.shape) - 1) + (_ELEMENTS,)}, (1, 10, 100))
    try:
        for draw in draws:
            z = scale * draw.arrays[logits]
            expected = z if cap is None else cap * np.tanh(z / cap)
            if draw.drawn or not values.agree(draw(changed), expected):
                return loss
    except values.UnknownError:
        return loss
    region = reached(
        [logits],
        lambda v: [t for t in v.users if t.size == v.size and t.made_by in _OF_CAPS | _STEPS],
    )
    before = reached([changed], lambda v: [o for o in v.operands if o in region])
    used_by = {*loss.used_by, *before, *sliced, loss.logits}
    made_of = [v for v in used_by if v is not logits and v not in loss.used_by]
    if not kept_arrays.are_used_only_by(made_of, used_by, program, _names(loss)):
        return loss
    # Arrays that the program's results do not depend on are saved for the softcap's derivative.
    chain = [v for v in region if v in before or v not in program.live]
    options = [f"logit_softcap={cap:.7g}"] if cap is not None else []
    options += [f"logits_scale={scale:.7g}"] if abs(scale - 1) > _ROUNDING else []
    inside = [v for v in dict.fromkeys((*chain, *sliced, *loss.inside)) if v is not logits]
    text = f", with {' and '.join(options)}" if options else ""
    return dataclasses.replace(loss, logits=logits, inside=inside, used_by=used_by, options=text)


def _names(loss: Loss) -> tuple[str, ...]:
    """Return the primitives that may use the logits besides the loss: they save no array."""
    return ("argmax",) if loss.ours is None else ("argmax", f"jaxnorm.{loss.ours}")


def factors_of(value: Value) -> tuple[Value, list[float]]:
    """Follow a value back through casts, and through multiplications by constants.

    Return the array that is reached, and a list of the constants. For a division by a constant, the
    list has its reciprocal.
    """
    value, factors = kept_arrays.uncast(value), list[float]()
    while value.made_by in ("mul", "div"):
        numbers = [kept_arrays.number(v) for v in value.operands]
        at = next((i for i, n in enumerate(numbers) if n is not None), None)
        if at is None or (value.made_by == "div" and at == 0):
            break
        factor = numbers[at] or 1.0
        factors.append(factor if value.made_by == "mul" else 1 / factor)
        value = kept_arrays.uncast(value.operands[1 - at])
    return value, factors


def _inside(logits: Value) -> list[Value]:
    """Return the arrays that are computed elementwise from the logits.

    Other operands of these computations have one number per row.
    """

    def is_step(value: Value) -> bool:
        fits = value.made_by in (*_STEPS, *NAMING) and value.size == logits.size
        return fits and len(value.whole_operands) == 1

    _, *inside = reached([logits], lambda v: filter(is_step, v.users))
    return inside


def _one_hots(values: Sequence[Value]) -> list[Value]:
    """Return the one-hot arrays with which `values` are multiplied."""
    products = [(v, user) for v in values for user in v.users if user.made_by == "mul"]
    factors = (f for v, product in products for f in map(origin, product.operands) if f is not v)
    return [*dict.fromkeys(filter(_is_one_hot, factors))]


def _is_one_hot(value: Value) -> bool:
    """Return True if a value is a comparison of labels with the indices of all classes."""
    compared = kept_arrays.uncast(value)
    if compared.made_by != "eq":
        return False
    return any(v.made_by == "iota" for v in kept_arrays.ancestors(compared, compared.size))


# --------------------------------------------------------------------- with the linear layer


def _of_linear(loss: Loss, program: Program) -> Advice | None:
    """Return advice to use a linear loss, or None if it does not apply.

    It applies if a linear layer computes the logits, and only the loss uses them.
    linear_softmax_cross_entropy does not save the operands of the matmul. Instead, it saves the
    gradients of the operands that are differentiated. linear_log_prob_and_entropy saves the
    operands.
    """
    path = from_matmul(loss.logits)
    if path is None:
        return None
    matmul = path[-1]
    inside = [*path, *loss.inside]
    function = loss.ours or _FUNCTION
    # An argmax of the logits would need the logits, too.
    used_by = {*path, *loss.used_by, loss.logits}
    before = [v for v in (*path, *used_by) if v.size >= loss.logits.size]
    if not kept_arrays.are_used_only_by(before, used_by, program, _names(loss)[1:]):
        return None
    if function == _FUNCTION and not _are_summed(loss.results, program):
        return None
    members = program.saved_of([*loss.inside, *path])
    if function == _FUNCTION:
        frozen, instead = with_gradients(matmul, program)
        members += frozen
    else:
        unsaved = [v for v in matmul.operands if not _is_saved(v, program)]
        instead = sum(v.bytes for v in unsaved) * matmul.layers
    sliced = ", and slice the matmul's input" * any(map(_is_slice, inside))
    what = "loss" if function == _FUNCTION else "call"
    saved = "only gradients are saved" if function == _FUNCTION else "only its operands are saved"
    weight = kept_arrays.rows_and_weight(matmul)[1]  # type: ignore[index]
    options = loss.options
    if kept_arrays.uncast(weight).dtype.itemsize > weight.dtype.itemsize:
        options += f"{' and' if options else ', with'} dtype={weight.dtype.name}"
    mean = " (it returns the mean: masks and weights go into where=)"
    how = (
        f"replace the {what} {{at}} and the matmul before it with jaxnorm.{_LINEAR[function]}"
        f"{options}{sliced}{mean * (function == _FUNCTION)}: {saved}, and no logits"
    )
    return Advice(_LINEAR[function], loss.source, how, members, instead, matmul.layers)


def _are_summed(losses: Sequence[Value], program: Program) -> bool:
    """Return True if only sums of losses are used, or sums of losses times constant weights."""

    def users(value: Value) -> list[Value]:
        return [v for v in value.users if v in program.live] if value.size > 1 else []

    def is_linear(value: Value) -> bool:
        of_losses = [v.is_active for v in value.operands]
        if value.made_by == "div":
            return of_losses == [True, False]
        return value.made_by in _SUMS or (value.made_by in _PRODUCTS and sum(of_losses) == 1)

    return all(v in losses or is_linear(v) for v in reached(losses, users))


def from_matmul(logits: Value) -> list[Value] | None:
    """Find the matmul of a linear layer that computes the logits.

    Return the list of arrays from the logits back to this matmul, or None if there is no matmul.
    """
    path, value = [], logits
    while value.made_by != "dot_general" and value.operands:
        path.append(value)
        if _is_slice(value) or value.made_by in kept_arrays.COPYING or value.made_by in NAMING:
            value = origin(value.operands[0])
        elif value.made_by == "add":
            rest = value.whole_operands
            if len(rest) != 1:
                return None
            value = origin(rest[0])
        else:
            return None
    factors = kept_arrays.rows_and_weight(value)
    if factors is None or logits.shape[-1] not in factors[1].shape:
        return None
    return [*path, value]


def _is_slice(value: Value) -> bool:
    """Return True for a slice that includes all columns, such as ``logits[:, :-1, :]``."""
    return value.made_by == "slice" and value.shape[-1:] == value.operands[0].shape[-1:]


def _is_saved(operand: Value, program: Program) -> bool:
    """Return True if an operand is a saved array, an argument, or a copy of one of these."""
    is_copy = any(v in program.by_origin for v in kept_arrays.copied(operand))
    return is_copy or kept_arrays.is_given(operand)


def with_gradients(matmul: Value, program: Program) -> tuple[list[Value], int]:
    """Compare the operands of a matmul with their gradients, which a linear loss saves instead.

    The gradients of frozen operands are not saved. Return two things: the saved arrays of frozen
    operands that only the matmul uses, and the number of bytes of the gradients that are saved in
    addition to their operands, because other computations need these.
    """
    frozen, instead = [], 0
    for operand in matmul.operands:
        saved = _saved_for(operand, matmul, program)
        if operand.is_active and saved is None:
            instead += operand.bytes * matmul.layers
        elif saved is not None and not operand.is_active:
            frozen.append(saved)
    return frozen, instead


def _saved_for(operand: Value, matmul: Value, program: Program) -> Value | None:
    """Find the saved array that is used only as the operand `operand` of `matmul`.

    Return None if the operand is not saved, or if other computations use it as well.
    """
    value, user = origin(operand), matmul
    while True:
        others = [t for t in value.users if t is not user and t.made_by != STACKED]
        if value in program.by_origin:
            is_for_it = not others and not value.made_by.startswith("jaxnorm.")
            return program.by_origin[value] if is_for_it else None
        if value.made_by not in kept_arrays.COPYING or others:
            return None
        value, user = origin(value.operands[0]), value
