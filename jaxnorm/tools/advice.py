"""A piece of advice of `memory_report`, and the program that it is about."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxnorm.tools import elementwise
from jaxnorm.tools.kept_arrays import Graph, Value, origin


class Advice(NamedTuple):
    """A change that saves fewer bytes, and where.

    Attributes:
      function: the function to use, as the report's summary names it.
      line: where: ``"file.py:12 (function)"``.
      template: an instruction, with ``{at}`` in place of "at file.py:12".
      members: saved arrays that are no longer saved if the advice is followed.
      instead: bytes that are saved in place of the members.
      runs: how often the line runs.
      label: what the sentence begins with, if not the function.
    """

    function: str
    line: str
    template: str
    members: Sequence[Value]
    instead: int
    runs: int
    label: str = ""

    @property
    def place(self) -> str:
        """The file and the number of the line."""
        return self.line.partition(" ")[0] or "an unknown line"

    @property
    def sentence(self) -> str:
        instruction = self.template.format(at=f"at {self.place}")
        return f"{self.label or self.function}: {instruction}"

    @property
    def saves(self) -> int:
        return sum(v.bytes for v in self.members) - self.instead


class Program:
    """A graph, as recognisers look at it.

    Attributes:
      values: all arrays, in the order in which they are made.
      saved: those that go from forward to backward.
      by_origin: each of these, by the identity of the value that made it.
      advised: identities of the saved arrays that have advice.
    """

    def __init__(self, graph: Graph) -> None:
        self.values, self.saved = graph.values, graph.saved
        self.by_origin = {id(origin(v)): v for v in graph.saved}
        self.advised: set[int] = set()

    def saved_of(self, values: Iterable[Value]) -> list[Value]:
        """Return the saved arrays of values, each once, without those that have advice."""
        found = {id(v): self.by_origin[id(v)] for v in values if id(v) in self.by_origin}
        return [v for v in found.values() if id(v) not in self.advised]

    def zeros_like(self, value: Value) -> list[Value]:
        """Return zeros of a value's shape that JAX saves, without those that have advice."""
        zeros = [v for v in self.saved if elementwise.is_zeros(origin(v), value)]
        return [v for v in zeros if id(v) not in self.advised]

    def extra_bytes(self, value: Value) -> int:
        """Return the bytes of all layers of a value, or 0 if it is there anyway."""
        is_there = id(value) in self.by_origin or value.made_by in elementwise.GIVEN
        return 0 if is_there else value.bytes * value.layers


#: A function that finds pieces of advice. Its docstring shows the code that it recognises.
Recogniser = Callable[[Program], Iterator[Advice]]
