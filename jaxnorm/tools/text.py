"""Functions that print tables and a progress bar in plain text."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

_WIDTH = 30


def table(lines: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """Return lines of cells as an aligned table.

    Columns whose indices are in `left` are left-aligned, all other columns are right-aligned.
    """
    left = set(left)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def mib(size: int) -> str:
    """Convert a number of bytes to MiB, as text with three significant digits and no exponent."""
    mib = size / 2**20
    return f"{mib:.3g}" if mib < 1000 else f"{mib:.0f}"


def short(text: str, width: int) -> str:
    """Cut text that is longer than `width` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def progress[T](items: Sequence[T], after: float = 0.0) -> Iterator[T]:
    """Yield the items and show a progress bar, if standard error is a terminal.

    Args:
      items: the items of work. The bar shows the `str` of the current item.
      after: seconds after which the bar appears, so that it is not shown for short work.
    """
    begin, is_shown = time.monotonic(), False
    for done, item in enumerate(items):
        if sys.stderr.isatty() and time.monotonic() - begin >= after:
            bar, is_shown = "#" * (_WIDTH * done // len(items)), True
            sys.stderr.write(f"\r\x1b[K[{bar:.<{_WIDTH}}] {done}/{len(items)} {item}")
            sys.stderr.flush()
        yield item
    if is_shown:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
