"""Python's stack, on which long loops of calls are slow at some depths."""

from collections.abc import Callable
from typing import Any


def in_one_chunk[T](function: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    """Calls a function where Python's stack has room for all that it calls.

    That stack is chunks of 16 KiB. In Python 3.12 a call that takes a new chunk maps its memory,
    and the return from it unmaps it again: where a loop deep in a trace makes such calls, it takes
    up to three times as long (https://github.com/python/cpython/issues/142183). A frame larger than
    a chunk gets one of its own size, up to the next power of two.
    """
    return function(*arguments, **named)


# A frame of 1 MiB, which it does not fill: the next power of two leaves as much for what it calls.
in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=2**17)
