"""Combinations of parameters: fewer than all of them."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per axis, such that any two values of two axes meet in one.

    This is enough for parameters that do not interact in threes. The result is deterministic, and
    in the order of the full product.
    """
    places = [*itertools.product(*(range(len(axis)) for axis in axes))]
    pairs = [set(itertools.combinations(enumerate(at), 2)) for at in places]
    missing = set().union(*pairs)
    chosen = set()
    # Choose greedily. If several add the same number, take the one whose values occurred least so
    # far.
    times = dict.fromkeys(itertools.chain(*(enumerate(at) for at in places)), 0)
    while missing:
        best = min(
            range(len(places)),
            key=lambda i: (-len(pairs[i] & missing), sum(times[v] for v in enumerate(places[i]))),
        )
        missing -= pairs[best]
        chosen.add(best)
        for value in enumerate(places[best]):
            times[value] += 1
    return [tuple(axis[i] for axis, i in zip(axes, places[at])) for at in sorted(chosen)]
