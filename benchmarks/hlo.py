"""What a compiled JAX program does beside what it has to: read in its optimised HLO."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?\S+ = (.+?) ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) .*\{$")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_SCOPE = re.compile(r'^ +(?:ROOT )?%?(\S+) = .*op_name="([^"]*)"', re.MULTILINE)
_SHAPE = re.compile(r"\[([\d,]*)\]")
_MOVES = {"copy", "copy-start", "convert", "transpose"}
_FREE = {"parameter", "bitcast", "reshape", "constant", "tuple", "get-tuple-element"}

Instruction = tuple[str, str, str]  # opcode, type, line


def extra_passes(text: str, elements: int) -> int:
    """Passes over arrays of `elements` or more that compute nothing: copies, converts, transposes.

    A copy may be no kernel on a GPU, but the driver's: its time is then not among the kernels'.
    """
    computations = dict(_computations(text))

    def moves_alone(opcode: str, line: str) -> bool:
        if opcode != "fusion":
            return opcode in _MOVES
        called = _CALLED.findall(line)
        inside = {name for each in called for name, _, _ in computations.get(each, ())}
        return bool(inside & _MOVES) and inside <= _MOVES | _FREE

    large = _large(computations, elements)
    return sum(moves_alone(opcode, line) for opcode, _, line in large)


def made(text: str, elements: int) -> list[str]:
    """What makes arrays of `elements` or more: opcodes."""
    large = _large(dict(_computations(text)), elements)
    return [opcode for opcode, *_ in large if opcode not in _FREE | {"call"}]


def scopes(text: str) -> dict[str, str]:
    """Where in the traced program an instruction comes from, by the name of a kernel made of it."""
    return {re.sub(r"\W", "_", name): scope for name, scope in _SCOPE.findall(text)}


def _large(
    computations: Mapping[str, Sequence[Instruction]], elements: int
) -> Iterator[Instruction]:
    """Instructions outside of fusions of which an array has `elements` or more."""
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
    """Of the largest array of a type."""
    sizes = (math.prod(map(int, filter(None, s.split(",")))) for s in _SHAPE.findall(kind))
    return max(sizes, default=0)
