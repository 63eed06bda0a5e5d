"""Tables and a progress bar, in plain text."""

import sys
from collections.abc import Iterable, Iterator, Sequence

_WIDTH = 30


def table(lines: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """Columns side by side; those of `left` begin where the others end."""
    left = set(left)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def progress[T](items: Sequence[T]) -> Iterator[T]:
    """The items, with a bar of how many are done, where standard error is a terminal."""
    shows = sys.stderr.isatty()
    for done, item in enumerate(items):
        if shows:
            bar = "#" * (_WIDTH * done // len(items))
            sys.stderr.write(f"\r\x1b[K[{bar:.<{_WIDTH}}] {done}/{len(items)} {item}")
            sys.stderr.flush()
        yield item
    if shows:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
