"""memory_report: what a derivative keeps from forward to backward, and what would keep less."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxnorm.tools import kept_arrays, memory_advice
from jaxnorm.tools.kept_arrays import Value
from jaxnorm.tools.text import table


@dataclasses.dataclass(frozen=True)
class KeptArray:
    """An array that goes from forward to backward.

    Attributes:
      bytes: its size, of all layers of a scan.
      shape, dtype: with the axes that scans stack.
      source: ``"file.py:12 (function)"``, the line that makes it; of a function of a library, the
        line that calls it.
      made_by: the operation that makes it, by JAX's name.
      layers: how often scans stack it; 1 outside of them.
      advice: what would not keep it; None where nothing is known.
      saves: by how many bytes the total falls for this array where the advice is followed.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    made_by: str
    layers: int
    advice: str | None
    saves: int


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a derivative keeps, largest first; prints as a table.

    Attributes:
      total: bytes of all rows.
      rows: arrays, each with ``bytes``, ``shape`` and ``dtype`` (with the axes that scans stack),
        ``source`` (``"file.py:12 (function)"``, the user's line), ``made_by`` (JAX's operation),
        ``layers`` (how often scans stack it), ``advice`` (what would not keep it, or None) and
        ``saves`` (by how many bytes the total falls where that is followed).
    """

    total: int
    rows: tuple[KeptArray, ...]

    def __iter__(self) -> Iterator[KeptArray]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        header = ("MiB", "array", "layers", "made by", "source", "saves", "advice")
        lines = [header] + [
            (
                _mib(row.bytes),
                f"{row.dtype.name}[{','.join(map(str, row.shape))}]",
                str(row.layers),
                row.made_by,
                row.source,
                _mib(row.saves) if row.advice else "",
                row.advice or "",
            )
            for row in self.rows
        ]
        total = (
            f"{_mib(self.total)} MiB go from forward to backward, arguments left out: what JAX "
            "hands over, of which XLA may keep less"
        )
        return "\n".join([table(lines, left=(1, 3, 4, 6)), total])


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g}"


def memory_report(
    f: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> MemoryReport:
    """What the derivative of a function keeps from forward to backward, and what would keep less.

    The function is traced, and not run: arguments may be shapes, and a large model takes seconds.
    Inside scan, `jax.checkpoint`, `jax.jit` and custom rules, too. Arguments and constants are not
    counted: they are there anyway. It counts what JAX hands over; XLA, which sees the whole program
    where layers are not in a loop, may keep less.

    Args:
      f: function of which ``jax.grad`` or ``jax.vjp`` takes the derivative.
      args: its arguments: trees of arrays or of ``jax.ShapeDtypeStruct``; what is neither, in a
        model, say, is passed as it is: Python's numbers, too.
      argnums: which arguments the derivative is with respect to: of their floating-point arrays.
      has_aux: whether f returns a pair, of which only the first is differentiated.

    Returns:
      A :class:`MemoryReport`: ``total`` in bytes, ``rows``, and a table as its ``str``. Advice is
      given of an activation before a linear layer, of norms, softmaxes and cross-entropies, and, in
      a scan, of a reshape or a cast of what is kept as well.

    Raises:
      TypeError: f is no function, or ``argnums`` no integer, and no sequence of them.
      ValueError: ``argnums`` names an argument that is not there.

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
      >>> report.total / 2**20, report.rows[0].advice.split(":")[0]
      (6.0, 'gated_linear')
    """
    if not callable(f):
        raise TypeError(
            f"memory_report: f is a {type(f).__name__}; expected a function, and its arguments "
            "after it: memory_report(f, *args)"
        )
    places = _places(argnums, len(args))
    with_paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = {i: leaf for i, (_, leaf) in enumerate(with_paths)}
    arguments = [path[0].idx for path, _ in with_paths]
    arrays = {i: a for i, a in leaves.items() if _is_array(a)}
    moving = [i for i, a in arrays.items() if arguments[i] in places and _is_inexact(a)]

    def residuals(arrays: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """What goes from forward to backward, and what f returns."""

        def of_moving(moving: dict[int, Any]) -> Any:
            return f(*jax.tree.unflatten(tree, (leaves | arrays | moving).values()))

        primals = {i: arrays[i] for i in moving}
        results = jax.vjp(of_moving, primals, has_aux=has_aux)  # type: ignore[call-overload]
        y, backward, *aux = results
        returned = [a for a in jax.tree.leaves((y, aux)) if _is_array(a)]
        return jax.tree.leaves(backward), returned

    traced, (from_forward, _) = jax.make_jaxpr(residuals, return_shape=True)(arrays)
    kept = kept_arrays.of(traced, len(from_forward))
    advice = memory_advice.advice(kept)
    rows = [_row(value, advice.get(id(value))) for value in kept]
    rows.sort(key=lambda row: -row.bytes)
    return MemoryReport(sum(row.bytes for row in rows), tuple(rows))


def _row(value: Value, advice: tuple[str, int] | None) -> KeptArray:
    sentence, saves = advice or (None, 0)
    made = kept_arrays.origin(value)
    return KeptArray(
        bytes=value.bytes,
        shape=value.shape,
        dtype=value.dtype,
        source=made.source or "?",
        made_by=made.made_by,
        layers=made.layers,
        advice=sentence,
        saves=saves,
    )


def _places(argnums: int | Sequence[int], count: int) -> set[int]:
    function = "memory_report"
    given = argnums if isinstance(argnums, Sequence) else [argnums]
    try:
        places = [operator.index(i) for i in given]
    except TypeError as error:
        raise TypeError(
            f"{function}: argnums={argnums!r}; expected an integer or a sequence of integers"
        ) from error
    for i in places:
        if not -count <= i < count:
            expected = f"integers from {-count} to {count - 1}" if count else "arguments after f"
            raise ValueError(
                f"{function}: argnums={argnums!r} of {count} arguments; expected {expected}"
            )
    return {i % count for i in places}


def _is_array(a: Any) -> bool:
    """Python's numbers, in a model, say how it is made: a rate, or whether it trains."""
    is_number = isinstance(a, (bool, int, float, complex))
    return isinstance(a, (jax.ShapeDtypeStruct, jax.typing.ArrayLike)) and not is_number


def _is_inexact(a: Any) -> bool:
    dtype = a.dtype if hasattr(a, "dtype") else np.result_type(a)
    return jax.numpy.issubdtype(dtype, jax.numpy.inexact)
