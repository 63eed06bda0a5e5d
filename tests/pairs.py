"""Combinations of parameters' values that cover all pairs of values.

They are fewer than the combinations of the Cartesian product.
"""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, with one value per axis, that cover all pairs of values.

    For any two axes, every pair of their values occurs in some combination. This suffices to test
    parameters of which no three interact. The result is deterministic and in the order of the full
    product.
    """
    places = [*itertools.product(*(range(len(axis)) for axis in axes))]
    pairs = [set(itertools.combinations(enumerate(at), 2)) for at in places]
    missing = set().union(*pairs)
    chosen = set()
    # Choose greedily. Among combinations that add equally many pairs, take the one whose values
    # have occurred least often.
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
