"""Combinations of parameters' values that cover all pairs of values.

They are fewer than the combinations of the Cartesian product.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

# Maps each implementation with kernels to the mark of its cases.
KERNELS = {"mosaic": pytest.mark.gpu, "triton": pytest.mark.triton}


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, with one value per axis, that cover all pairs of values.

    For any two axes, every pair of their values occurs in some combination. This suffices to test
    parameters of which no three interact. The result is deterministic and in the order of the full
    product.
    """
    places = [*itertools.product(*(range(len(axis)) for axis in axes))]
    pairs = [[*itertools.combinations(enumerate(at), 2)] for at in places]
    with_pair = collections.defaultdict(list)
    for i, of_place in enumerate(pairs):
        for pair in of_place:
            with_pair[pair].append(i)
    added = [*map(len, pairs)]  # how many pairs each combination would add
    chosen = set()
    # Choose greedily. Among combinations that add equally many pairs, take the one whose values
    # have occurred least often.
    times = dict.fromkeys(itertools.chain(*(enumerate(at) for at in places)), 0)
    while most := max(added, default=0):
        best = min(
            (i for i, count in enumerate(added) if count == most),
            key=lambda i: sum(times[value] for value in enumerate(places[i])),
        )
        for pair in pairs[best]:
            for i in with_pair.pop(pair, ()):
                added[i] -= 1
        chosen.add(best)
        for value in enumerate(places[best]):
            times[value] += 1
    return [tuple(axis[i] for axis, i in zip(axes, places[at])) for at in sorted(chosen)]


def each_pair(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with the names `names` and all pairs of values of `axes`."""
    return pytest.mark.parametrize(tuple(names.split()), pairwise(*axes))


def on_each_implementation(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with the names `names` and with the fixture `implementation`.

    Kernels run with all combinations of the values in `axes`. XLA's code runs with combinations
    that cover all pairs of values.
    """
    cases = {"xla": pairwise(*axes), **dict.fromkeys(KERNELS, (*itertools.product(*axes),))}
    return pytest.mark.parametrize(
        (*names.split(), "implementation"),
        [
            pytest.param(*values, implementation, marks=KERNELS.get(implementation, ()))
            for implementation, combinations in cases.items()
            for values in combinations
        ],
        indirect=["implementation"],
        ids=str,
    )
