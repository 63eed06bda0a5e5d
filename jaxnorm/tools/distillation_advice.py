"""Advice on Kullback-Leibler divergences in plain JAX, as in distillation losses.

A divergence is recognised in the traced program by two features. First, the exponentials of a row
of logits, and the logarithm of their sum. Second, a sum over the row, in which probabilities are
multiplied by values that are computed from the other distribution.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from jaxnorm.tools import kept_arrays, loss_advice
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin, reached

_FUNCTION, _LINEAR = "kl_divergence", "linear_kl_divergence"
# Primitives of elementwise operations on one array of logits, or on two of the same shape.
_STEPS = {
    "add", "convert_element_type", "div", "exp", "log", "mul", "neg", "select_n", "sub", *NAMING,
}  # fmt: skip
_REDUCTIONS = ("reduce_", STACKED)
_ALONE = {"convert_element_type", "exp", "log", "neg", *NAMING}

#: Primitives that this module recognises, in addition to `memory_advice.COMMON`.
PRIMITIVES = {"reduce_max", "reduce_sum", "select_n", "sub", "exp", "log"}


class _Divergence(NamedTuple):
    """A divergence that was found in a program.

    Attributes:
      student, teacher: the logits of the student and of the teacher, before they are cast or
        multiplied by constants.
      inside: the arrays, as large as the logits, that are computed from the logits and used only by
        the divergence.
      source: the user's line that computes the student's exponentials.
      options: text of the advice about ``logits_scale``; "" if no scale is needed.
    """

    student: Value
    teacher: Value
    inside: Sequence[Value]
    source: str
    options: str


def divergences(program: Program) -> Iterator[Advice]:
    """Recognise a divergence between two softmaxes, with or without the linear layers before them.

    The code looks like this.

    ::

        log_q = log_softmax(x @ weight)
        log_p = stop_gradient(log_softmax(teacher_x @ teacher_weight))
        loss = sum(exp(log_p) * (log_p - log_q), -1)

    With exp(log_q) in place of exp(log_p), the user must pass `reverse=True`. The text of the
    advice mentions this option in both cases.
    """
    done: set[Value] = set()
    for value in map(origin, program.saved):
        found = _found(value)
        if found is None or found.student in done:
            continue
        done.add(found.student)
        both = _of_logits(found, program), _of_linear(found, program)
        yield max(filter(None, both), key=attrgetter("saves"))


def _found(exponentials: Value) -> _Divergence | None:
    """Find the divergence whose student softmax is computed from `exponentials`.

    Return None if there is no such divergence. `exponentials` may be any array of the program.
    """
    if exponentials.made_by != "exp" or not exponentials.is_active:
        return None
    student, scale = _logits_of(exponentials)
    if not student.is_active:
        return None
    own = _region([student])
    others = {
        logits: factor
        for value in own
        if value is not student
        for operand in value.whole_operands
        if origin(operand) not in own
        for logits, factor in [_logits_of(origin(operand))]
    }
    if len(others) != 1:
        return None
    ((teacher, of_teacher),) = others.items()
    is_alike = teacher.shape == student.shape and not teacher.is_active
    if not is_alike or abs(of_teacher - scale) > 1e-6 * abs(scale):
        return None
    region = _region([student, teacher])
    inside = [v for v in region if v is not student and v is not teacher]
    if not loss_advice.is_logarithm(exponentials, inside):
        return None
    if not any(v.made_by == "exp" and not v.is_active for v in inside):
        return None
    if not _is_used_only_by(region, inside):
        return None
    options = "" if abs(scale - 1) < 1e-3 else f", logits_scale={scale:g}"
    return _Divergence(student, teacher, inside, exponentials.source, options)


def _region(logits: Sequence[Value]) -> dict[Value, None]:
    """Return the logits and all arrays of their size that are computed elementwise from them."""
    size = logits[0].size
    return reached(logits, lambda v: [t for t in v.users if t.size == size and t.made_by in _STEPS])


def _is_used_only_by(region: Container[Value], values: Iterable[Value]) -> bool:
    """Return True if `values` are used only by arrays in `region` and by reductions."""
    users = kept_arrays.users_outside(values, region)
    return all(user.made_by.startswith(_REDUCTIONS) for user in users)


def _logits_of(value: Value) -> tuple[Value, float]:
    """Return the logits from which a softmax or log-softmax is computed, and their constant factor.

    `value` is the softmax, the log-softmax, or an intermediate array.
    """
    value = origin(value)
    while value.operands:
        first, *others = value.operands
        is_alone = value.made_by in _ALONE and not others
        if not is_alone and not _is_step_of_softmax(value):
            break
        value = origin(first)
    logits, factors = loss_advice.factors_of(value)
    return logits, math.prod(factors)


def _is_step_of_softmax(value: Value) -> bool:
    """Return True if `value` is a row minus a number, or exponentials divided by their sum.

    A number that is subtracted from a row does not change its softmax. Any other array that the
    user's code subtracts, or by which it divides the logits, does.
    """
    if value.made_by not in ("sub", "div") or kept_arrays.number(value.operands[1]) is not None:
        return False
    first, second = map(origin, value.operands)
    if second.made_by == "broadcast_in_dim" and second.size == value.size:
        second = origin(second.operands[0])
    is_of_rows = second.shape[-1:] == (1,)
    is_sum = first.made_by == "exp" and kept_arrays.is_reduced(second, value.size)
    return is_of_rows and (value.made_by == "sub" or is_sum)


def _of_logits(found: _Divergence, program: Program) -> Advice:
    how = (
        f"replace the divergence {{at}} with jaxnorm.{_FUNCTION}(logits, teacher_logits"
        f"{found.options}), with reverse=True for KL(student || teacher): only both "
        "logits are saved"
    )
    instead = program.extra_bytes(found.student) + program.extra_bytes(found.teacher)
    layers = found.student.layers
    return Advice(_FUNCTION, found.source, how, program.saved_of(found.inside), instead, layers)


def _of_linear(found: _Divergence, program: Program) -> Advice | None:
    """Return advice to use `linear_kl_divergence`, or None if it does not apply.

    It applies if both arrays of logits are results of linear layers, and only the divergence uses
    them.
    """
    student, teacher = map(loss_advice.from_matmul, (found.student, found.teacher))
    if student is None or teacher is None:
        return None
    matmul = student[-1]
    region = dict.fromkeys([*student, *teacher, *found.inside])
    if not _is_used_only_by(region, region):
        return None
    frozen, instead = loss_advice.with_gradients(matmul, program)
    members = [*program.saved_of(region), *frozen]
    how = (
        f"replace the divergence {{at}} and both matmuls before it with jaxnorm.{_LINEAR}(x, "
        f"weight, teacher_x, teacher_weight{found.options}), with reverse=True for "
        "KL(student || teacher): only gradients are saved, and no logits"
    )
    return Advice(_LINEAR, found.source, how, members, instead, matmul.layers)
