"""The code with ``checkpoint_name`` that a user adds to save the arrays of a plan by hand."""

import ast
import collections
import functools
import itertools
import linecache
import os
import re
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from jax.extend.core import Var

from jaxnorm.calls import private_jax
from jaxnorm.remat import costs
from jaxnorm.remat.programs import variables
from jaxnorm.tools import kept_arrays
from jaxnorm.tools.text import short

# Maximum number of characters of an expression in the printed code.
_WIDTH = 45


class Line(NamedTuple):
    """Code that names an array, and its place in the user's code.

    Attributes:
      place: the line in the user's code, ``"model.py:12"``.
      text: an assignment to add after this line, ``'q = checkpoint_name(q, "q")'``; or a call that
        replaces its argument in this line, ``'checkpoint_name(f(x), "f")'``.
      name: the name that the array gets.
    """

    place: str
    text: str
    name: str


class Saved(NamedTuple):
    """The saved arrays of a program.

    Attributes:
      equations: the equations of the forward pass, in order.
      outputs: results of the program.
      arrays: the saved arrays. Each is a result of an equation.
    """

    equations: Sequence[Any]
    outputs: Sequence[Any]
    arrays: Sequence[Var]


class _Span(NamedTuple):
    """The place of an expression in the user's code. Columns are numbers of bytes."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int


def lines(programs: Sequence[Saved]) -> list[Line]:
    """Return lines that name the saved arrays of some programs.

    An array can be named if it is the value of an expression in the user's code. It may be the
    value of several expressions, such as the operand of ``return`` in a function and a call of this
    function. An expression that runs several times has several values, and a line names all of
    them. The line is therefore written for the expression whose other values (those that need not
    be saved) have the fewest bytes.
    """
    graphs = [*map(_Calls, programs)]

    @functools.cache
    def named(span: _Span) -> frozenset[Var]:
        return frozenset(v for graph in graphs for v in graph.values(span))

    pairs = [(graph, v) for graph, program in zip(graphs, programs) for v in program.arrays]
    wanted = {u for graph, v in pairs for u in graph.equals(v)}

    def price(span: _Span) -> tuple[int, bool]:
        excess = sum(costs.size(v.aval) for v in named(span) - wanted)
        return excess, not _targets(span.file)[span]

    chosen: dict[_Span, None] = {}
    covered: set[Var] = set()
    for graph, v in pairs:
        equals = graph.equals(v)
        if covered.isdisjoint(equals):
            spans = next(filter(None, map(graph.spans, equals)), None)
            if spans is not None:
                best = min(spans, key=price)
                chosen[best] = None
                covered |= named(best)
    found: list[Line] = []
    count = collections.Counter[str]()
    for span in chosen:
        target, code = _targets(span.file)[span], _source(span)
        word = target or _word(code)
        count[word] += 1
        name = word if count[word] == 1 else f"{word}_{count[word]}"
        text = f'checkpoint_name({target or short(code, _WIDTH)}, "{name}")'
        text = f"{target} = {text}" if target else text
        found.append(Line(f"{os.path.basename(span.file)}:{span.line}", text, name))
    return found


# Primitives whose result can be saved instead of their operand, and vice versa.
_COPYING = {"reshape", "squeeze", "transpose"}
# The derivatives of these primitives use the primitive's result. `checkpoint_name` returns a copy
# of the result, and a policy that saves the copy does not save the result. So the operand is named
# instead, and the backward pass recomputes the result from the operand.
_USES_RESULT = {"exp", "exp2", "logistic", "rsqrt", "sqrt", "tanh"}


class _Calls:
    """Maps equations of a program to the expressions in whose evaluation they run."""

    def __init__(self, program: Saved) -> None:
        self._equations = program.equations
        chains = [*map(_chain, program.equations)]
        # Equations in jitted functions of libraries may have no place in the user's code. They get
        # the expressions that the nearest equations with a place, before and after, have in common.
        places = [i for i, chain in enumerate(chains) if chain]
        for before, after in itertools.pairwise(places):
            around = _common([chains[before], chains[after]])
            chains[before + 1 : after] = [around] * (after - before - 1)
        # Expressions around the whole program, such as the call of the function, are left out.
        common = len(_common([chains[i] for i in places]))
        self._chains = [chain[: max(1, len(chain) - common)] for chain in chains]
        self._maker = {v: i for i, e in enumerate(program.equations) for v in e.outvars}
        last = len(program.equations)
        self._users: dict[Var, list[int]] = {v: [last] for v in variables(program.outputs)}
        for i, e in enumerate(program.equations):
            for v in variables(e.invars):
                self._users.setdefault(v, []).append(i)

    def spans(self, v: Var) -> list[_Span]:
        """Return the expressions whose value is `v`, the innermost first."""
        i = self._maker[v]
        levels = enumerate(self._chains[i])
        return [s for level, s in levels if s in _targets(s.file) and v in self._values(i, level)]

    def equals(self, v: Var) -> list[Var]:
        """Return `v` and the arrays that can be saved instead of it, the best first.

        These are reshaped or transposed copies of `v`, and the operand of the equation that
        computes `v`. The operand is included only if it is the only one and has the size of `v`,
        and if the equation is not costly.
        """
        users = [self._equations[i] for i in self._users.get(v, ()) if i < len(self._equations)]
        maker = self._equations[self._maker[v]]
        operands = [u for u in variables(maker.invars) if u in self._maker]
        if len(operands) > 1 or costs.is_costly(maker):
            operands = []
        before = [u for u in operands if costs.size(u.aval) == costs.size(v.aval)]
        found = [v, *(e.outvars[0] for e in users if e.primitive.name in _COPYING), *before]
        return found[::-1] if maker.primitive.name in _USES_RESULT else found

    def values(self, span: _Span) -> Iterator[Var]:
        """Yield the values of all evaluations of an expression."""
        i = 0
        while i < len(self._chains):
            last = i + 1
            if span in (chain := self._chains[i]):
                level = chain.index(span)
                yield from self._values(i, level)
                _, last = self._evaluation(i, level)
            i = last

    def _evaluation(self, i: int, level: int) -> tuple[int, int]:
        """Return the range of equations that run in one evaluation of an expression.

        The range is a pair of indices: the first equation, and the equation after the last one.
        The expression has the index `level` in the chain of equation `i`; see `_chain`.
        """
        outer = self._chains[i][level:]
        first, last = i, i + 1
        while first > 0 and self._chains[first - 1][-len(outer) :] == outer:
            first -= 1
        while last < len(self._chains) and self._chains[last][-len(outer) :] == outer:
            last += 1
        return first, last

    def _values(self, i: int, level: int) -> list[Var]:
        """Return the value of an expression, from the evaluation in which equation `i` runs.

        The value of an expression is the only array that its evaluation computes and that is used
        outside of it. If there are several, and equations with the same place and primitive compute
        them, the expression was evaluated several times in a row, and all values are returned.
        Otherwise, the result is empty.
        """
        first, last = self._evaluation(i, level)
        used = [
            v
            for e in self._equations[first:last]
            for v in e.outvars
            if any(not first <= k < last for k in self._users.get(v, ()))
        ]
        makers = [self._maker[v] for v in used]
        kinds = {(self._chains[k], self._equations[k].primitive) for k in makers}
        return used if len(kinds) == 1 and len({*makers}) == len(used) else []


def _common(chains: Sequence[tuple[_Span, ...]]) -> tuple[_Span, ...]:
    """Return the outermost expressions that several chains have in common; see `_chain`."""
    levels = zip(*(chain[::-1] for chain in chains))
    same = itertools.takewhile(lambda level: len({*level}) == 1, levels)
    return tuple(level[0] for level in same)[::-1]


def _chain(equation: Any) -> tuple[_Span, ...]:
    """Return the user's expressions in which an equation runs, the innermost first."""
    found: list[_Span] = []
    for code, instruction in private_jax.raw_frames(equation):
        if not kept_arrays.is_installed(code.co_filename):
            place = _positions(code)[instruction // 2]
            found.append(_Span(code.co_filename, *place))  # type: ignore[arg-type]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    return [*code.co_positions()]


# ------------------------------------------------------------------------------- the user's code


@functools.lru_cache(maxsize=64)
def _targets(file: str) -> dict[_Span, str]:
    """Return a dict that maps each expression of a file to the variable that it is assigned to.

    An expression that is not assigned to a variable is mapped to "".
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # such as a notebook cell with shell commands
        return {}
    found: dict[_Span, str] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[Any, Any]] = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=many)], value=ast.Tuple(elts=values)):
                pairs = [*zip(values, many)] if len(values) == len(many) else []
            case ast.Assign(targets=[target], value=value):
                pairs = [(value, target)]
            case ast.AugAssign(target=target):
                pairs = [(node, target)]
            case ast.expr():
                pairs = [(node, None)]
        for value, target in pairs:
            span = _Span(
                file, value.lineno, value.end_lineno, value.col_offset, value.end_col_offset
            )
            found[span] = found.get(span, "") or str(getattr(target, "id", ""))
    return found


def _source(span: _Span) -> str:
    """Return an expression as one line of code."""
    parts = [line.encode() for line in linecache.getlines(span.file)[span.line - 1 : span.end_line]]
    parts[-1] = parts[-1][: span.end_column]
    parts[0] = parts[0][span.column :]
    return " ".join(part.decode().strip() for part in parts)


def _word(code: str) -> str:
    """Return a name for an expression's value: a key, function or variable in it, or "saved"."""
    patterns = r"""\[["'](\w+)["']\]""", r"(\w+)\(", r"([^\W\d]\w*)"
    keys, functions, names = (re.findall(pattern, code) for pattern in patterns)
    return next(iter([*keys[-1:], *functions[:1], *names[:1], "saved"]))
