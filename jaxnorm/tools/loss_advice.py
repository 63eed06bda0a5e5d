"""Advice on cross-entropies of integer labels, with or without the linear layer before them.

A cross-entropy is recognised in the traced program by two features: the logarithm of a sum of
exponentials over a row, and the selection of an element of that row, by a gather or by a
multiplication with a one-hot array.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from jaxnorm.tools import kept_arrays
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

# Names of primitives, or beginnings of names. Usually, no advice is given if code outside a loss
# uses the arrays of the loss. These primitives are the exceptions, because their derivatives save
# no array of the logits' size. There is one tuple for each of two kinds of advice:
#
# * `_REDUCTIONS` is for advice to use a loss that includes the linear layer.
# * `_OF_LOGITS` is for advice to use a loss that takes logits. It includes argmax, because the
#   program still computes the logits with such a loss.
_REDUCTIONS = ("gather", "reduce_", STACKED)
_OF_LOGITS = (*_REDUCTIONS, "argmax")

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
      source: the user's line that computes the loss.
      ours: name of jaxnorm's function that computes the loss; None for a loss in plain JAX.
      options: text of the advice about the softcap; "" if there is none.
    """

    logits: Value
    inside: Sequence[Value]
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
        loss = _ours(value) or _plain(value)
        if loss is not None and loss.logits not in done:
            done.add(loss.logits)
            yield loss


def _ours(value: Value) -> Loss | None:
    """Find the call of a jaxnorm loss that takes `value` as its logits.

    Return that call, or None if there is none.
    """
    for user in kept_arrays.users(value):
        name = user.made_by.removeprefix("jaxnorm.")
        if name in _LINEAR and user.operands and origin(user.operands[0]) is value:
            logits = kept_arrays.uncast(value)
            inside = [] if logits is value else [value]
            return _uncapped(Loss(logits, inside, user.source, name))
    return None


def _plain(value: Value) -> Loss | None:
    """Find a loss that is written in plain JAX; `value` must be the exponentials of its logits.

    Return None if `value` does not belong to such a loss.
    """
    if value.made_by != "exp":
        return None
    shifted = origin(value.operands[0])
    is_shifted = shifted.made_by == "sub" and shifted.operands[1].is_spread
    logits = kept_arrays.uncast(shifted.operands[0] if is_shifted else shifted)
    inside = _inside(logits)
    if value not in inside or not is_logarithm(value, inside):
        return None
    one_hots = _one_hots([logits, *inside])
    if not one_hots and not any(t.made_by == "gather" for v in [logits, *inside] for t in v.users):
        return None
    if not _are_for_the_loss(inside, _OF_LOGITS):
        return None
    return _uncapped(Loss(logits, [*inside, *one_hots], value.source, None))


def _uncapped(loss: Loss) -> Loss:
    """Extend a loss by the softcap ``cap * tanh(logits / cap)`` of its logits, if there is one.

    If there is no softcap, or if code outside the loss uses the softcap's result, the loss is
    returned unchanged.
    """
    sliced = [loss.logits] * _is_slice(loss.logits)
    capped, factors = factors_of(sliced[0].operands[0] if sliced else loss.logits)
    if capped.made_by != "tanh":
        return loss
    logits, inverses = factors_of(kept_arrays.uncast(capped.operands[0]))
    cap, scale = np.prod(factors), np.prod(factors) * np.prod(inverses)
    region = reached(
        [logits],
        lambda v: [t for t in v.users if t.size == v.size and t.made_by in _OF_CAPS | _STEPS],
    )
    after = [*loss.inside, *sliced]
    chain = [v for v in region if v is not logits and v not in after]
    is_cap = len(factors) == 1 and all(v.made_by in _OF_CAPS for v in chain)
    names = (*_OF_LOGITS, f"jaxnorm.{loss.ours}") if loss.ours else _OF_LOGITS
    if not is_cap or not _are_for_the_loss(chain, names, [*region, *after]):
        return loss
    options = f", with logit_softcap={cap:g}"
    if abs(scale - 1) > 1e-3:
        options += f" and logits_scale={scale:g}"
    inside = [*chain, *sliced, *[v for v in loss.inside if v is not logits]]
    return dataclasses.replace(loss, logits=logits, inside=inside, options=options)


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


def is_logarithm(exponential: Value, inside: Sequence[Value]) -> bool:
    """Return True if exponentials are summed over the last axis and a logarithm follows.

    The logarithm may be taken of the sum, or of the exponentials divided by the sum. `inside` are
    the arrays that are computed elementwise from the logits.
    """
    last = len(exponential.shape) - 1
    sums = [t for t in kept_arrays.users(exponential) if t.made_by == "reduce_sum"]
    if not any(tuple(s.equation.params["axes"]) == (last,) for s in sums):
        return False
    picked = [t for v in inside for t in v.users if t.made_by == "gather"]
    if any(v.made_by == "log" for v in inside) or (picked and all(map(_is_logged, picked))):
        return True
    names = (*kept_arrays.ELEMENTWISE, *kept_arrays.COPYING, "broadcast_in_dim")

    def made_of_rows(value: Value) -> list[Value]:
        is_of_row = value.size < exponential.size
        return [t for t in value.users if is_of_row and t.made_by in names]

    return any(v.made_by == "log" for v in reached(sums, made_of_rows))


def _is_logged(value: Value) -> bool:
    """Return True if all users of an array are logarithms, or copies that only logarithms use."""
    users = [t for t in value.users if t.made_by != STACKED]
    names = (*kept_arrays.COPYING, *NAMING)
    of_it = [t.made_by == "log" or (t.made_by in names and _is_logged(t)) for t in users]
    return bool(of_it) and all(of_it)


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


def _is_pick(user: Value) -> bool:
    return user.made_by == "mul" and any(map(_is_one_hot, map(origin, user.operands)))


def _are_for_the_loss(
    values: Sequence[Value], others: tuple[str, ...], inside: Sequence[Value] = ()
) -> bool:
    """Return True if values are used only by the loss and by primitives named in `others`.

    Only the operations that use `values` are checked. An operation belongs to the loss if the
    operation's result is in `values` or in `inside`. A string in `others` is the name of a
    primitive, or the beginning of the names of several primitives.
    """
    users = kept_arrays.users_outside(values, {*values, *inside})
    return all(_is_pick(user) or user.made_by.startswith(others) for user in users)


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
    others = (f"jaxnorm.{function}", STACKED, *NAMING) if loss.ours else _REDUCTIONS
    if not _are_for_the_loss(inside, others):
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
    how = (
        f"replace the {what} {{at}} and the matmul before it with jaxnorm.{_LINEAR[function]}"
        f"{loss.options}{sliced}: {saved}, and no logits"
    )
    return Advice(_LINEAR[function], loss.source, how, members, instead, matmul.layers)


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
            rest = [v for v in value.operands if not v.is_spread]
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
