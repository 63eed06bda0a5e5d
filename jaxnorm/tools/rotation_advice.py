"""Where RMSNorm's result is rotated, as queries and keys are: what rms_norm_rope keeps of both.

    n = rms_norm(x)
    y = n cos + partner(n) sin     the elements of n in pairs: halves, or neighbours

It keeps y, which attention keeps anyway, and no n.
"""

from collections.abc import Mapping

from jaxnorm.tools import elementwise
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin, reached

#: The function that does both.
FUNCTION = "rms_norm_rope"

# Cutting rows into pairs, rotating them, and putting them together again.
_STEPS = {
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "expand_dims", "gather",
    "mul", "neg", "reshape", "slice", "split", "squeeze", "stack", "sub", *NAMING,
}  # fmt: skip


def is_kept_rotated(result: Value, by_origin: Mapping[int, Value]) -> bool:
    """Whether what is kept of a norm's result is its rotation, for which alone it is made."""
    inside = _made_of(result)
    for value in inside.values():
        if value.size != result.size or value.made_by not in ("add", "concatenate", "reshape"):
            continue
        way = _way(result, value, inside)
        names = {v.made_by for v in way}
        if "mul" in names and names & {"concatenate", "stack"} and names & {"add", "sub"}:
            casts = [t for t in elementwise.takers(value) if t.size == value.size]
            is_kept = any(id(origin(v)) in by_origin for v in (value, *casts))
            before = [result, *[v for v in way if v is not value]]
            if is_kept and _is_for_it(before, inside):
                return True
    return False


def _made_of(result: Value) -> dict[int, Value]:
    """It, and what steps of a rotation make of it, by id, in their order."""

    def steps(value: Value) -> list[Value]:
        return [t for t in value.takers if t.made_by in _STEPS and t.size <= result.size]

    return reached([result], steps)


def _way(result: Value, value: Value, inside: Mapping[int, Value]) -> list[Value]:
    """The steps from a norm's result to a value, which is one of them."""

    def before(value: Value) -> list[Value]:
        return [v for v in value.operands if id(v) in inside and v is not result]

    return [*reached([value], before).values()]


def _is_for_it(values: list[Value], inside: Mapping[int, Value]) -> bool:
    """Whether nothing but steps of the rotation takes what comes before its result."""
    takers = (taker for value in values for taker in value.takers)
    return all(id(taker) in inside or taker.made_by == STACKED for taker in takers)
