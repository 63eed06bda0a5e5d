"""memory_report: list the arrays that a derivative saves, with advice to save fewer of them."""

import collections
import contextlib
import dataclasses
import functools
import html
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.remat import planning
from jaxnorm.remat.auto_remat import Call, auto_remat, indices, is_array
from jaxnorm.remat.regions import is_inexact
from jaxnorm.tools import kept_arrays, logits_advice
from jaxnorm.tools.kept_arrays import Program, Value
from jaxnorm.tools.logits_advice import Advice
from jaxnorm.tools.text import mib, short, table

# Limits of the printed table: its width in characters, its maximum number of rows, and the fraction
# of the total bytes below which a row is not shown.
_WIDTH, _ROWS, _SHARE = 100, 24, 0.005
# `auto_remat` is advised if it reduces the total bytes by at least this fraction.
_WORTHWHILE = 0.01
# The report shows several arrays in one row if all of the following fields of `KeptArray` are
# equal: shape, dtype, source, made_by, layers and advice.
type _Key = tuple[tuple[int, ...], np.dtype, str, str, int, str | None]
_HEADER = ("MiB", "array", "count", "made by", "source", "advice")
# Maximum widths of some columns, in characters. The column "source" gets the remaining width.
_LIMITS = {"array": 28, "made by": 16, "advice": 20}


@dataclasses.dataclass(frozen=True)
class KeptArray:
    """A group of similar arrays that the forward pass saves for the backward pass.

    The attributes shape, dtype, source, made_by, layers and advice are equal for all of the arrays.

    Attributes:
      bytes: total size of the arrays, in all layers.
      shape, dtype: shape and dtype of one array. If a scan stacks the array of each iteration, this
        is the shape of the stacked array. On a mesh, it is the shape of one device's shard.
      source: the user's line that computes the array, ``"file.py:12 (function)"``. If an installed
        package computes the array, this is the user's line that calls the package. "?" if the line
        is unknown.
      made_by: JAX's name of the operation that computes the array.
      layers: number of layers in one array: the number of iterations of the scans that stack it; 1
        outside of scans.
      advice: a change to the code after which these arrays are not saved, or None.
      saves: number of bytes by which the total falls if the advice on these arrays is followed.
      count: number of arrays in the group, times ``layers``.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    made_by: str
    layers: int
    advice: str | None
    saves: int
    count: int = 1

    @property
    def array(self) -> str:
        """The dtype and shape of one array as text, ``"float32[8,16]"``."""
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class Remat(NamedTuple):
    """The number of bytes that `auto_remat` frees, and the time that it costs.

    Attributes:
      saves: number of bytes by which `auto_remat` reduces the total.
      recompute: predicted time of recomputation, divided by the time of both passes.
      together: number of bytes by which the total falls if other advice is followed as well.
    """

    saves: int
    recompute: float
    together: int


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The arrays that a derivative saves. `str` returns a table and a summary of the advice.

    Attributes:
      total: number of bytes of all saved arrays.
      rows: groups of similar arrays, the largest first. A group has these attributes:

        - ``bytes``: total size of the arrays, in all layers;
        - ``shape``, ``dtype``: shape and dtype of one array. If a scan stacks the array of each
          iteration, this is the shape of the stacked array;
        - ``source``: the user's line that computes the array, ``"file.py:12 (function)"``. If only
          installed packages compute it, the name of a package precedes the file;
        - ``made_by``: JAX's name of the operation that computes the array;
        - ``layers``: number of layers in one array: the number of iterations of the scans that
          stack it; 1 outside of scans;
        - ``advice``: a change to the code after which these arrays are not saved, or None;
        - ``saves``: number of bytes by which this change reduces the total;
        - ``count``: number of arrays in the group, times ``layers``.
    """

    total: int
    rows: tuple[KeptArray, ...]
    _advice: Mapping[str, Advice] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    _remat: Remat | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def saves(self) -> int:
        """Number of bytes by which the total falls if all advice and `auto_remat` are applied."""
        alone = sum(row.saves for row in self.rows)
        return alone if self._remat is None else max(alone, self._remat.together)

    def __iter__(self) -> Iterator[KeptArray]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def table(self, max_rows: int | None = None) -> str:
        """Return the rows as text, at most 100 columns wide.

        Args:
          max_rows: maximum number of rows to show; None for all. The largest rows are shown. If
            rows are left out, a last line says how many, and gives their total size.

        Raises:
          TypeError, ValueError: ``max_rows`` is not an integer of at least 1.
        """
        if max_rows is not None:
            max_rows = checks.integer("MemoryReport.table", "max_rows", max_rows, "rows")
        shown = self.rows[:max_rows]
        lines = [_HEADER, *map(self._cells, shown)]
        if not any(row.advice for row in shown):
            lines = [line[:-1] for line in lines]
        lines = [
            tuple(short(cell, _LIMITS.get(name, _WIDTH)) for name, cell in zip(_HEADER, line))
            for line in lines
        ]
        at, widths = _HEADER.index("source"), [max(map(len, column)) for column in zip(*lines)]
        width = _WIDTH - sum(widths) + widths[at] - 2 * (len(lines[0]) - 1)
        lines = [(*line[:at], _short_source(line[at], width), *line[at + 1 :]) for line in lines]
        text = table(lines, left=(1, 3, 4, 5))
        rest = self.rows[len(shown) :]
        if rest:
            rows = "1 row is" if len(rest) == 1 else f"{len(rest)} rows are"
            text += f"\n{rows} not shown: {mib(sum(row.bytes for row in rest))} MiB"
        return text

    def _cells(self, row: KeptArray) -> tuple[str, ...]:
        advice = self._advice.get(row.advice or "")
        function = advice.function if advice else (row.advice or "").partition(":")[0]
        return mib(row.bytes), row.array, str(row.count), row.made_by, row.source, function

    def __str__(self) -> str:
        large = sum(row.bytes >= _SHARE * self.total for row in self.rows)
        rows = [self.table(min(large, _ROWS))] if self.rows else []
        return "\n\n".join([*rows, self._after_rows()])

    def _after_rows(self) -> str:
        """Return the text below the table: the advice, and the totals.

        Advice to use `auto_remat` comes first. The rest is grouped by the function that it advises,
        and the function that saves the most bytes comes first.
        """
        saves = collections.Counter[str]()
        pieces: dict[str, list[Advice]] = {}
        for sentence, advice in self._advice.items():
            saves[advice.function] += sum(r.saves for r in self.rows if r.advice == sentence)
            pieces.setdefault(advice.function, []).append(advice)
        lines = []
        if self._remat is not None:
            line = (
                f"auto_remat saves {mib(self._remat.saves)} of {mib(self.total)} MiB: "
                "jaxnorm.auto_remat(fun) computes these arrays again, which takes "
                f"{self._remat.recompute:.1%} of the predicted time of both passes"
            )
            lines += _wrapped(line, "", "  ")
        for function, size in saves.most_common():
            places = collections.Counter[str]()
            for one in pieces[function]:
                places[one.place] += one.runs
            where = "; ".join(f"{p}, {n} time{'s' * (n > 1)}" for p, n in places.items())
            line = f"{function} saves {mib(size)} of {mib(self.total)} MiB: {where}"
            lines += _wrapped(line, "", "  ")
            at = f"at {pieces[function][0].place}" if len(places) == 1 else "there"
            for template in dict.fromkeys(one.template for one in pieces[function]):
                lines += _wrapped(template.format(at=at), "  ", "  ")
        total = (
            f"{mib(self.total)} MiB are saved for the backward pass, without arguments. Inside "
            "lax.scan, XLA saves exactly these arrays; in unrolled code XLA may keep less."
        )
        if self.saves:
            total += f" All advice together saves {mib(self.saves)} MiB."
        return "\n".join([*lines, *[""] * bool(lines), *_wrapped(total, "", "")])

    def _repr_html_(self) -> str:
        """Return the report as HTML for notebooks: the largest rows as a table, and the summary."""
        lines = [_HEADER, *map(self._cells, self.rows[:_ROWS])]
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines]
        table = "".join(f"<tr>{cells}</tr>" for cells in rows)
        return f"<table>{table}</table><pre>{html.escape(self._after_rows())}</pre>"


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _short_source(source: str, width: int) -> str:
    """Shorten a source line to `width` characters: drop the function, then cut the file name."""
    place = source.partition(" ")[0]
    if len(source) <= width or len(place) <= width:
        return source if len(source) <= width else place
    return f"…{place[len(place) - width + 1 :]}"


def memory_report(
    f: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> MemoryReport:
    """Report the arrays that the derivative of a function saves, with advice to save fewer.

    The function is traced, but not run, so arguments may be shapes, and a large model takes only
    seconds. The report covers scans, `jax.checkpoint`, `jax.jit` and custom rules. Arguments and
    constants are not counted, because they are in memory anyway. The report counts the residuals of
    JAX; XLA may save less if layers are not in a loop. On a mesh, and inside ``jax.shard_map``, the
    bytes of one device are counted. (If arguments are sharded over Auto axes, the forward pass is
    compiled to find how XLA shards the residuals.)

    Args:
      f: the function to differentiate, as for ``jax.grad`` or ``jax.vjp``.
      args: the function's arguments: trees of arrays or of ``jax.ShapeDtypeStruct``. Other leaves,
        such as Python numbers in a model, are passed unchanged.
      argnums: index or indices of the arguments whose floating-point arrays are differentiated.
      has_aux: True if f returns a pair of which only the first element is differentiated.

    Returns:
      A :class:`MemoryReport`, with ``total`` and ``saves`` in bytes, and ``rows``; ``print`` it for
      a table. Its text states how many bytes :func:`auto_remat` frees, and the time that it costs.
      If :func:`linear_loss` makes it unnecessary to save logits, or arrays computed from logits,
      their rows have advice. A specific loss, such as :func:`linear_kl_divergence`, is advised
      instead if it returns the same numbers as the user's code, for random logits.

    Raises:
      TypeError: f is not a function; ``argnums`` is neither an integer nor a sequence of integers;
        an argument that ``argnums`` names has arrays, but none with floating-point numbers.
      ValueError: ``argnums`` has the index of an argument that does not exist.

    If JAX cannot differentiate f, the error is that of ``jax.grad``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> def mlp(w, x):
      ...     return jnp.sum((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"])
      >>> shapes = {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
      >>> w = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
      >>> x = jax.ShapeDtypeStruct((1024, 64), "float32")
      >>> report = jaxnorm.memory_report(mlp, w, x)
      >>> report.total / 2**20, report.saves / 2**20
      (6.0, 4.0)
    """
    return report_of(f, args, argnums, has_aux)


def report_of(
    f: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    has_advice: bool = True,
) -> MemoryReport:
    """Return the report of `memory_report`, with or without advice."""
    if not callable(f):
        raise TypeError(
            f"memory_report: f is a {type(f).__name__}; expected a function, and its arguments "
            "after it: memory_report(f, *args)"
        )
    places = _places(argnums, len(args))
    # A Python number that is a whole argument is data. A number in a tree is an option of a model.
    args = [
        jnp.asarray(a) if i in places and isinstance(a, (bool, int, float, complex)) else a
        for i, a in enumerate(args)
    ]
    with_paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = {i: leaf for i, (_, leaf) in enumerate(with_paths)}
    arguments = [path[0].idx for path, _ in with_paths]
    arrays = {i: a for i, a in leaves.items() if is_array(a)}
    moving = [i for i, a in arrays.items() if arguments[i] in places and is_inexact(a)]
    for place in places:
        own = [i for i in arrays if arguments[i] == place]
        if own and not {*own} & {*moving}:
            dtypes = ", ".join(dict.fromkeys(arrays[i].dtype.name for i in own))
            raise TypeError(
                f"memory_report: argument {place} of f has only arrays of {dtypes}; expected "
                "floating-point arrays to differentiate; pass argnums= of the argument that has "
                "them or, if f closes over its parameters, make them an argument"
            )

    def run(moving: dict[int, Any], arrays: dict[int, Any]) -> Any:
        return f(*jax.tree.unflatten(tree, (leaves | arrays | moving).values()))

    def residuals(arrays: dict[int, Any], run: Callable[..., Any] = run) -> tuple[Any, Any]:
        """Return the residuals of f's derivative, and the results of f."""
        primals = {i: arrays[i] for i in moving}
        of_moving = functools.partial(run, arrays=arrays)
        results = jax.vjp(of_moving, primals, has_aux=has_aux)  # type: ignore[call-overload]
        y, backward, *aux = results
        y = jax.tree.map(jnp.asarray, y)  # f may return a Python number
        # Trace the backward pass as well, because it fails for some functions, such as a while loop
        # of unknown length.
        jax.eval_shape(backward, jax.tree.map(_cotangent, y))
        returned = [a for a in jax.tree.leaves((y, aux)) if is_array(a)]
        return jax.tree.leaves(backward), returned

    def program_of(residuals: Callable[..., Any]) -> Program:
        traced, (saved, _) = jax.make_jaxpr(residuals, return_shape=True)(arrays)
        return Program(traced, len(saved), [i in moving for i in arrays])

    @functools.cache
    def forward() -> Program:
        """Return the program of f."""
        traced = jax.make_jaxpr(lambda a: [*filter(is_array, jax.tree.leaves(run({}, a)))])(arrays)
        return Program(traced, 0, [False] * len(arrays), inlines_rules=False)

    program = program_of(residuals)
    parts = _parts(residuals, arrays, program)
    pieces = logits_advice.advice(program, forward) if has_advice else {}
    told: dict[str, Advice] = {}
    groups: dict[_Key, list[int]] = {}  # Values: [bytes, `KeptArray.saves`, count].
    for value in program.saved:
        advice, saves = pieces.get(value, (None, 0))
        made, shape = kept_arrays.origin(value), parts.get(value, value.local)
        size = math.prod(shape) * value.dtype.itemsize
        sentence = None if advice is None else advice.sentence
        key = shape, value.dtype, made.source or "?", made.made_by, made.layers, sentence
        added = size, saves * size // value.bytes, made.layers
        groups[key] = [sum(pair) for pair in zip(groups.get(key, (0, 0, 0)), added)]
    for one in {id(advice): advice for advice, _ in pieces.values()}.values():
        runs = one.runs + (told[one.sentence].runs if one.sentence in told else 0)
        told[one.sentence] = one._replace(runs=runs)
    rows = [KeptArray(size, *key, saves, count) for key, (size, saves, count) in groups.items()]
    rows.sort(key=lambda row: -row.bytes)
    report = MemoryReport(sum(row.bytes for row in rows), tuple(rows), told)
    if not (has_advice and rows):
        return report
    with_remat = program_of(functools.partial(residuals, run=auto_remat(run)))
    default, least = (sum(v.bytes for v in p.saved) for p in (program, with_remat))
    if default - least < _WORTHWHILE * default:
        return report
    also = sum(saves for _, saves in logits_advice.advice(with_remat, forward).values())
    call = Call(run, [{i: arrays[i] for i in moving}, arrays], {}, ())
    found = call.survey([owner == 0 for owner in call.owners])
    recompute = found.recomputed(planning.unlimited())
    # If XLA chooses shardings, `default` and `least` count whole arrays, but `report` counts only
    # shards. So bytes of whole arrays are multiplied by `report.total / default`.
    saves, together = (
        n * report.total // default for n in (default - least, default - least + also)
    )
    return dataclasses.replace(report, _remat=Remat(saves, recompute, together))


def _cotangent(y: Any) -> Any:
    """Return a zero cotangent of a result. For an integer result, its dtype is float0."""
    return jnp.zeros_like(y) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0)


def _parts(
    residuals: Callable[..., Any], arrays: Mapping[int, Any], program: Program
) -> dict[Value, tuple[int, ...]]:
    """Return, for each saved array whose sharding XLA chooses, the shape of one device's shard.

    XLA chooses shardings if arguments, or arrays in the function, are sharded over Auto axes of a
    mesh; otherwise, the result is empty.
    """
    shardings = [getattr(a, "sharding", None) for a in arrays.values()]
    constraints = [v for v in program.values if v.made_by == "sharding_constraint"]
    inside = [v.equation.params.get("sharding") for v in constraints]
    if not any(map(_is_auto, [*shardings, *inside])):
        return {}
    parts: dict[Value, tuple[int, ...]] = {}
    with contextlib.suppress(ValueError, RuntimeError):  # this machine may lack the mesh's devices
        compiled = jax.jit(lambda arrays: residuals(arrays)[0]).lower(arrays).compile()
        for value, sharding in zip(program.outputs, jax.tree.leaves(compiled.output_shardings)):
            if value.local == value.shape:
                parts[value] = tuple(sharding.shard_shape(value.shape))
    return parts


def _is_auto(sharding: Any) -> bool:
    """Return True if a sharding divides an array over Auto axes of a mesh of real devices."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    used = [axis for axes in sharding.spec if axes for axis in np.atleast_1d(axes)]
    is_auto = any(kinds[str(axis)] == jax.sharding.AxisType.Auto for axis in used)
    return is_auto and isinstance(sharding.mesh, jax.sharding.Mesh) and sharding.mesh.size > 1


def _places(argnums: int | Sequence[int], count: int) -> set[int]:
    places = indices("memory_report", "argnums", argnums)
    for i in places:
        if not -count <= i < count:
            expected = f"integers from {-count} to {count - 1}" if count else "arguments after f"
            raise ValueError(
                f"memory_report: argnums={argnums!r} of {count} arguments; expected {expected}"
            )
    return {i % count for i in places}
