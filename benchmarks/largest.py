"""The largest whole number that fits, where asking is dear."""

from collections.abc import Callable, Mapping

GUESSES = 8  # along the line; after them the interval is halved


def largest(used: Callable[[int], int], limit: int, known: Mapping[int, int]) -> int:
    """The largest n with ``used(n) <= limit``, or 0; `used` grows, more or less along a line.

    ``known`` holds at least one value of ``used``. The answer is exact however `used` bends: n was
    asked and fits, n + 1 was asked and does not.
    """
    values = dict(known)
    while True:
        below = max((n for n, value in values.items() if value <= limit), default=0)
        above = min((n for n, value in values.items() if value > limit), default=None)
        if above == below + 1:
            return below
        if len(values) - len(known) >= GUESSES or len(values) == 1:
            n = 2 * below if above is None else (below + above) // 2
        else:
            n = max(_on_the_line(values, limit), below + 1)
            n = n if above is None else min(n, above - 1)
        values[n] = used(n)


def _on_the_line(values: Mapping[int, int], limit: int) -> int:
    """Where the line through the two values next to the limit reaches it."""
    (a, low), (b, high) = sorted(sorted(values.items(), key=lambda item: abs(item[1] - limit))[:2])
    return b if high <= low else int(a + (limit - low) * (b - a) / (high - low))
