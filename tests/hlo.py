"""Operations and collectives of a compiled JAX program, read from its optimised HLO."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?\S+ = (.+?) ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) .*\{$")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_SHAPE = re.compile(r"\[([\d,]*)\]")
_FREE = {"parameter", "bitcast", "reshape", "constant", "tuple", "get-tuple-element"}

_COLLECTIVE = re.compile(
    r"^(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?$"
)
_ARRAY = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")
_BODY = re.compile(r"body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

Instruction = tuple[str, str, str]  # opcode, result type, line of text


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation in a compiled program.

    Attributes:
      name: its opcode, such as "all-gather".
      array: the dtype and shape of its result, such as "bf16[16,64]".
      size: the number of bytes that each device sends in one run. Ring algorithms and direct
        exchange send the same number.
      runs: the number of times that the operation runs in one call of the program. It is more than
        1 if the operation is in a loop.
    """

    name: str
    array: str
    size: int
    runs: int

    @property
    def bytes(self) -> int:
        return self.size * self.runs


def collectives(text: str, devices: int) -> list[Collective]:
    """Return the collectives of a program that runs on `devices` devices.

    A collective operation may have several result arrays, because XLA combines collectives, and
    because an all-to-all may have an array for each device. The list has an entry for each array.

    A collective in a loop runs once per iteration. If XLA does not state the number of iterations
    of a loop, one iteration is assumed.
    """
    computations = dict(_computations(text))
    loops = {}  # maps a loop's body to (the computation that has the loop, number of iterations)
    for name, instructions in computations.items():
        for opcode, _, line in instructions:
            if opcode == "while":
                (body,), trips = _BODY.findall(line), _TRIPS.findall(line)
                loops[body] = name, int(trips[0]) if trips else 1

    def runs(computation: str) -> int:
        outer, trips = loops.get(computation, ("", 1))
        return trips * runs(outer) if outer else 1

    return [
        Collective(found[1], array, _sent(found[1], array, line, devices), runs(name))
        for name, instructions in computations.items()
        for opcode, kind, line in instructions
        if (found := _COLLECTIVE.match(opcode))
        for array in _results(opcode, kind)
    ]


def _results(opcode: str, kind: str) -> list[str]:
    """Return the result arrays of a collective, given its opcode and its result type.

    The result type of a "-start" opcode lists the operands before the results. The operands are
    skipped.
    """
    arrays = [found[0] for found in _ARRAY.finditer(kind)]
    return arrays[len(arrays) // 2 :] if opcode.endswith("-start") else arrays


def _sent(name: str, array: str, line: str, devices: int) -> int:
    """Return the bytes that a device sends in one run of a collective."""
    n = _group(line, devices)
    factors = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
    return round(_bytes(array) * factors.get(name, (n - 1) / n))


def _bytes(array: str) -> int:
    """Return the number of bytes of an array such as "bf16[16,64]"."""
    _, bits, shape = next(iter(_ARRAY.findall(array)))
    return math.prod(map(int, filter(None, shape.split(",")))) * max(int(bits or 8) // 8, 1)


def _group(line: str, devices: int) -> int:
    """Return the number of devices in each group that exchanges data in a collective."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", found[2]))
    return devices


def made(text: str, elements: int) -> list[str]:
    """Return the opcodes of the operations that produce arrays of at least `elements` elements."""
    large = _large(dict(_computations(text)), elements)
    return [opcode for opcode, *_ in large if opcode not in _FREE | {"call"}]


def _large(
    computations: Mapping[str, Sequence[Instruction]], elements: int
) -> Iterator[Instruction]:
    """Yield the large instructions that are not inside a fusion.

    An instruction is large if its result has at least `elements` elements.
    """
    fused = {
        called
        for instructions in computations.values()
        for opcode, _, line in instructions
        if opcode == "fusion"
        for called in _CALLED.findall(line)
    }
    for name, instructions in computations.items():
        for instruction in instructions if name not in fused else ():
            if _elements(instruction[1]) >= elements:
                yield instruction


def _computations(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            instructions = []
            yield found[1], instructions
        elif found := _INSTRUCTION.match(line):
            instructions.append((found[2], found[1], line))


def _elements(kind: str) -> int:
    """Return the number of elements of the largest array in an HLO type, which may be a tuple."""
    sizes = (math.prod(map(int, filter(None, s.split(",")))) for s in _SHAPE.findall(kind))
    return max(sizes, default=0)
