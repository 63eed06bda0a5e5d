"""Advice on an RMSNorm whose result is rotated, as queries and keys are: rms_norm_rope."""

from collections.abc import Iterator, Mapping, Sequence

from jaxnorm.tools import elementwise
from jaxnorm.tools.advice import Advice, Program
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin, reached

#: Primitives that cut rows into pairs, rotate these, and put them together again.
STEPS = {
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "gather",
    "mul", "neg", "reshape", "slice", "split", "squeeze", "stack", "sub", *NAMING,
}  # fmt: skip


def rotations(program: Program) -> Iterator[Advice]:
    """Recognise a rotation of what `jaxnorm.rms_norm` returns.

    ::

        n = jaxnorm.rms_norm(x, scale)    jaxnorm.rms_norm_rope: saves y, not n
        y = n * cos + partner(n) * sin    the elements of n in pairs: halves, or neighbours

    Attention saves y in any case. (Other norms with a rotation: `norm_advice.norms`.)
    """
    for value in program.saved:
        norm = origin(value)
        if norm.made_by == "jaxnorm.rms_norm" and is_saved_rotated(norm, program):
            yield of_norm(norm.source, [value], norm.layers)


def of_norm(line: str, members: Sequence[Value], runs: int) -> Advice:
    """Return advice for a norm whose rotation is saved in any case."""
    template = (
        "replace the norm {at} and the rotation after it with jaxnorm.rms_norm_rope: only the "
        "rotated result is saved"
    )
    return Advice("rms_norm_rope", line, template, members, 0, runs)


def is_saved_rotated(result: Value, program: Program) -> bool:
    """Return True if only the rotation of a norm's result is saved, and nothing else uses it."""
    inside = _made_of(result)
    for value in inside.values():
        if value.size != result.size or value.made_by not in ("add", "concatenate", "reshape"):
            continue
        way = _way(result, value, inside)
        names = {v.made_by for v in way}
        if "mul" in names and names & {"concatenate", "stack"} and names & {"add", "sub"}:
            casts = [t for t in elementwise.users(value) if t.size == value.size]
            is_saved = any(id(origin(v)) in program.by_origin for v in (value, *casts))
            before = [result, *[v for v in way if v is not value]]
            if is_saved and _is_for_it(before, inside):
                return True
    return False


def _made_of(result: Value) -> dict[int, Value]:
    """Return a value and what steps of a rotation make of it, by identity, in order."""

    def steps(value: Value) -> list[Value]:
        return [t for t in value.users if t.made_by in STEPS and t.size <= result.size]

    return reached([result], steps)


def _way(result: Value, value: Value, inside: Mapping[int, Value]) -> list[Value]:
    """Return the steps from a norm's result to a value, which is one of them."""

    def before(value: Value) -> list[Value]:
        return [v for v in value.operands if id(v) in inside and v is not result]

    return [*reached([value], before).values()]


def _is_for_it(values: list[Value], inside: Mapping[int, Value]) -> bool:
    """Return True if only steps of the rotation use what comes before its result."""
    users = (user for value in values for user in value.users)
    return all(id(user) in inside or user.made_by == STACKED for user in users)
