"""How the operands of a call lie on a mesh."""

import jax
from jax import lax


def vary_alike(*operands: jax.Array | None) -> list[jax.Array | None]:
    """Makes all operands vary over the same manual mesh axes, inside `jax.shard_map`.

    A parameter that is the same on every device meets rows that are not. The gradient of this cast
    is the sum over those axes, so that of the parameter is the same on every device again.
    """
    varying = [frozenset() if a is None else _varying(a) for a in operands]
    everywhere = frozenset().union(*varying)
    return [
        a if a is None or own == everywhere else _vary(a, everywhere - own)
        for a, own in zip(operands, varying)
    ]


def _varying(a: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def _vary(a: jax.Array, axes: frozenset[str]) -> jax.Array:
    varied: jax.Array = lax.pcast(a, tuple(sorted(axes)), to="varying")
    return varied
