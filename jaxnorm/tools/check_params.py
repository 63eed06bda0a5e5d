"""check_params: find norms whose gradients would be inaccurate if they saved their output."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.tools.text import table
from jaxnorm_kernels.specs import FLOAT_DTYPES, NormOptions, Spec

# save="input" is advised if the predicted relative error of a column's gradient exceeds this limit.
# The limit is about as large as the noise of ordinary minibatch gradients.
_ADVISE_INPUT = 0.1

SAFE = "safe"
INPUT_ADVISED = 'save="input" advised'

# Libraries name the scale of a norm ``scale`` or ``weight``, and the bias ``bias``. In a norm class
# that the model defines itself, the names may also be those in `_OWN_SCALES` and `_BIASES`.
_OWN_SCALES = ("w", "gamma")
_BIASES = ("bias", "b", "beta")

# Matches the names of norms: input_layernorm, LayerNorm_0, q_norm, norm1, norm_f, ln_2.
_NORM_S_NAME = re.compile(r"(norm|(^|_)ln)_?(\d+|f)?$", re.IGNORECASE)

_Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class NormReport:
    """The predicted accuracy of gradients if a norm saves its output.

    Attributes:
      path: path of the norm's parameters in the tree.
      columns: number of elements of the scale, in all layers if layers are stacked.
      under_floor: number of columns in which ``|scale + scale_offset|`` is below a limit that
        depends on the dtype of the norm's output. For float16, the limit is 2**-14, below which
        the output is less accurate. For other dtypes, the limit is 2**-60 (float64: 2**-500), and
        the forward pass replaces smaller values by the limit.
      max_bias_ratio: largest ``|bias / (scale + scale_offset)|`` of a column; 0 without a bias.
      dscale_error: predicted relative error of the scale's gradient, in the worst column.
      verdict: ``"safe"``, or the advice to use ``save="input"``.
      max_partner_ratio: largest ratio of the larger to the smaller ``|scale + scale_offset|`` in a
        pair of rotated columns; None for a norm whose output is not rotated.
    """

    path: str
    columns: int
    under_floor: int
    max_bias_ratio: float
    dscale_error: float
    verdict: str
    max_partner_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class ParamReport:
    """The reports on all norms of a model, in the order of the tree. `str` returns a table.

    Attributes:
      dtype: name of the dtype of the norms' outputs.
      norms: a report on each norm.
    """

    dtype: str
    norms: tuple[NormReport, ...]

    @property
    def safe(self) -> bool:
        """True if norms were found, and all of them can save their output."""
        return bool(self.norms) and all(norm.verdict == SAFE for norm in self.norms)

    def __iter__(self) -> Iterator[NormReport]:
        return iter(self.norms)

    def __len__(self) -> int:
        return len(self.norms)

    def __str__(self) -> str:
        if not self.norms:
            return 'no norm found: no parameter is named "scale", and no norm\'s is named "weight"'
        columns = {
            "norm": [norm.path for norm in self.norms],
            "columns": [str(norm.columns) for norm in self.norms],
            "under floor": [str(norm.under_floor) for norm in self.norms],
            "max |bias/scale|": [f"{norm.max_bias_ratio:.2g}" for norm in self.norms],
            "max partner/scale": [
                "" if norm.max_partner_ratio is None else f"{norm.max_partner_ratio:.2g}"
                for norm in self.norms
            ],
            "dscale error": [f"{norm.dscale_error:.1e}" for norm in self.norms],
            "verdict": [norm.verdict for norm in self.norms],
        }
        if all(norm.max_partner_ratio is None for norm in self.norms):
            del columns["max partner/scale"]
        lines = [tuple(columns), *zip(*columns.values())]
        return table(lines, left=(0, len(columns) - 1))


def check_params(
    params: Any,
    dtype: DTypeLike,
    *,
    scale_offset: float = 0.0,
    rotated: str | Sequence[str] | None = None,
    rotated_columns: int | None = None,
    interleaved: bool = False,
    scale_names: str | Sequence[str] | None = None,
) -> ParamReport:
    """Check the norms of a model: predict how accurate gradients are with ``save="output"``.

    From the saved output y, the backward pass recovers ``x_hat = (y - bias) / scale``. The rounding
    error of x_hat depends only on the parameters, so the report needs no data. The predicted
    relative error of the gradient of scale is, in column j::

        error(dscale_j) = sqrt((0.83 u)^2 (1 + (bias_j / scale_j)^2) + (q / (sqrt(12) scale_j))^2)

    Here, u is half the unit roundoff of ``dtype``, and 0.83 u is about the root mean square of the
    relative rounding errors of normal numbers. q is the spacing of the subnormal numbers of
    ``dtype``. If y is rotated in pairs of columns (:func:`jaxnorm.rms_norm_rope`), the rounding
    errors of both columns of a pair contribute. Let partner_j be the scale of the other column of
    the pair. The first term under the root is then
    ``(0.83 u)^2 (1 + (partner_j / scale_j)^2) / 2``. The function runs on the host, and copies the
    parameters there.

    Args:
      params: a tree of parameters with the names of Flax (linen or nnx), equinox or PyTorch. Names
        may be nested, or joined by dots or slashes. An equinox model can be passed unchanged.
        Leaves may be stacked over layers. A module *looks like a norm* if its name is typical of
        norms (``q_norm``, ``input_layernorm``, ``ln_1``, ``norm_f``), or if the name of its class
        contains ``Norm``. The scale of a norm is one of the following leaves:

        - a leaf named ``scale``;
        - a leaf named ``weight`` next to a ``bias`` of the same shape (the bias of a linear layer
          has another shape);
        - a leaf named ``weight`` without a ``bias``, if the leaf has one axis, or if its module
          looks like a norm;
        - a leaf named ``w`` or ``gamma``, if its module looks like a norm. (Some models define
          their own norm class and use these names, for example the models in Tunix.)

        A leaf named ``bias`` next to the scale is the norm's bias. Next to ``w``, ``gamma`` or a
        name in ``scale_names``, the bias may also be named ``b`` or ``beta``.
      dtype: dtype of the norms' *output*, not of the parameters.
      scale_offset: number that is added to every scale, as in the norm functions.
      rotated: name or names of the norms whose output is rotated, such as ``("q_norm", "k_norm")``.
        A name is the last part of a norm's path, or the last few parts. The last axis of such a
        norm's scale must have one element for each column of a head.
      rotated_columns: number of rotated columns of each norm named in ``rotated``. This is twice
        the length of the last axis of cos and sin. None if all columns are rotated.
      interleaved: True if a rotated pair is two adjacent columns, False if it is one column of each
        half of the rotated columns; as in :func:`jaxnorm.rms_norm_rope`.
      scale_names: name or names of scales in norm classes that the model itself defines. A leaf
        with such a name is treated like a leaf named ``weight``.

    Returns:
      A :class:`ParamReport`: a sequence of :class:`NormReport`, each with a verdict; ``print`` it
      for a table. If no norm is found, its attribute ``safe`` is False.

    Raises:
      TypeError: ``dtype`` is not a supported float dtype; a scale or bias is not a real float
        array; an option has the wrong type.
      ValueError: a bias and its scale differ in shape; a name in ``rotated`` is not the name of any
        norm; a norm named in ``rotated`` has a bias; ``rotated_columns`` is odd, or larger than the
        number of columns of a norm named in ``rotated``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> params = {"norm": {"scale": jnp.ones(512), "bias": jnp.full(512, 1e3)}}
      >>> report = jaxnorm.check_params(params, jnp.bfloat16)
      >>> report.safe, report.norms[0].verdict
      (False, 'save="input" advised')
    """
    caller = "check_params"
    y_dtype = checks.dtype(caller, "dtype", dtype)
    offset = checks.number(caller, "scale_offset", scale_offset)
    names = _names("rotated", rotated, 'names of norms, such as ("q_norm", "k_norm")')
    own = _names("scale_names", scale_names, 'names of parameters, such as ("w",)')
    scales = {"scale", "weight", *own, *_OWN_SCALES}
    if rotated_columns is not None:
        rotated_columns = checks.integer(caller, "rotated_columns", rotated_columns, "columns")
    interleaved = checks.flag(caller, "interleaved", interleaved)
    partners = functools.partial(_partners, rotated_columns, interleaved)
    leaves = _flat(params)
    of_norms = {path for path, node in _flat(params, _is_norm).items() if _is_norm(node)}
    norms, found = [], set[str]()
    for path, scale in leaves.items():
        # In nnx, a parameter is an object, and an attribute of it holds the array. The last part of
        # the path is then this attribute, and the part before it is the parameter's name.
        at = next((i for i in (-1, -2) if len(path) >= -i and path[i] in scales), None)
        if at is None:
            continue
        parent, rest = path[:at], path[len(path) + at + 1 :]
        biases = _BIASES if path[at] in (*own, *_OWN_SCALES) else _BIASES[:1]
        found_biases = (leaves.get((*parent, bias, *rest)) for bias in biases)
        bias = next((leaf for leaf in found_biases if leaf is not None), None)
        is_in_norm = parent in of_norms or any(map(_NORM_S_NAME.search, parent[-1:]))
        name = "weight" if path[at] in own else path[at]
        if not _is_scale(name, scale, bias, is_in_norm):
            continue
        path_ = "/".join(parent) or "(root)"
        of_path = [name for name in names if _ends_with(path_, name)]
        found.update(of_path)
        norms.append(_report(path_, scale, bias, y_dtype, offset, partners if of_path else None))
    for name in names:
        if name not in found:
            known = ", ".join(norm.path for norm in norms) or "none"
            raise ValueError(
                f"{caller}: rotated names {name!r}, and the path of no norm ends so; norms that "
                f"were found: {known}"
            )
    return ParamReport(y_dtype.name, tuple(norms))


def _names(argument: str, given: str | Sequence[str] | None, expected: str) -> tuple[str, ...]:
    names = () if given is None else (given,) if isinstance(given, str) else given
    is_sequence = isinstance(names, Iterable)
    for name in names if is_sequence else (names,):
        if not isinstance(name, str):
            wrong = f"{'has' if is_sequence else 'is'} a {type(name).__name__}"
            raise TypeError(f"check_params: {argument} {wrong}; expected {expected}")
    return tuple(names)


def _ends_with(path: str, name: str) -> bool:
    """Return True if the last parts of a path are the parts of `name`, split at dots or slashes."""
    parts = re.split("[./]", name)
    return path.split("/")[-len(parts) :] == parts


def columns_lost(scale: np.ndarray, bias: np.ndarray | None, y_dtype: np.dtype) -> int:
    """Return the number of columns for which `check_params` would advise save="input"."""
    b = None if bias is None else bias.astype(np.float64)
    *_, error = _errors(scale.astype(np.float64), b, y_dtype)
    return int(np.sum(~(error <= _ADVISE_INPUT)))


def _report(
    path: str,
    scale: Any,
    bias: Any,
    y_dtype: np.dtype,
    offset: float,
    partners: Callable[[str, int], np.ndarray] | None,
) -> NormReport:
    g = _host("scale", path, scale) + offset
    b = None if bias is None else _host("bias", path, bias)
    if b is not None and b.shape != g.shape:
        raise ValueError(
            f"check_params: {path} has scale of shape {g.shape} and bias of shape {b.shape}; "
            "expected equal shapes"
        )
    if b is not None and partners is not None:
        raise ValueError(
            f"check_params: rotated names {path}, which has a bias; rms_norm_rope takes none; "
            "list norms without a bias in rotated="
        )
    pairs = None if partners is None else partners(path, (g.shape or (1,))[-1])
    ratio, of_partner, error = _errors(g, b, y_dtype, pairs)
    # The backward pass clips the recovered x_hat (the normalised x) to the largest value that x_hat
    # can have. So even if x_hat consists of rounding errors only, the computed gradient is not much
    # larger than the correct one. Its error is then at most about as large as the correct gradient.
    # Therefore, the predicted relative error is limited to 1.
    worst = float(np.max(np.minimum(error, 1.0), initial=0.0))
    return NormReport(
        path=path,
        columns=g.size,
        under_floor=int(np.sum(np.abs(g) < (_floor_of(y_dtype) or 2.0**-14))),
        max_bias_ratio=float(np.max(ratio, initial=0.0)),
        dscale_error=worst,
        verdict=SAFE if worst <= _ADVISE_INPUT else INPUT_ADVISED,
        max_partner_ratio=None if pairs is None else float(np.max(of_partner, initial=0.0)),
    )


def _errors(
    scale: np.ndarray, bias: np.ndarray | None, y_dtype: np.dtype, pairs: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three numbers for each column.

    They are ``|bias / scale|``, the ratio of the other column's |scale| to the own one if the
    columns are rotated in pairs, and the predicted relative error of scale's gradient. `pairs` has,
    for each column, the index of the other column of its pair. If the forward pass replaces a small
    |scale| by a limit, the limit is used here as well.
    """
    info = jnp.finfo(y_dtype)
    carried = np.maximum(np.abs(scale), _floor_of(y_dtype) or 0.0)
    of_partner = carried if pairs is None else carried[..., pairs]
    bias = np.zeros_like(scale) if bias is None else bias
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(bias == 0, 0.0, np.abs(bias) / carried)
        # If both scales are 0, y is 0 in both columns, and the ratio does not matter. (Both can be
        # 0 only in float16, which has no lower limit of |scale|.)
        of_partner = np.where(of_partner == carried, 1.0, of_partner / carried)
        # The root mean square of the output y, divided by |scale|.
        spread = np.hypot(1.0, ratio) if pairs is None else np.hypot(1.0, of_partner) / math.sqrt(2)
        # Half the unit roundoff is about the mean relative rounding error of normal numbers.
        subnormal = float(info.smallest_subnormal) / (math.sqrt(12) * carried)
        return ratio, of_partner, np.hypot(0.83 * float(info.eps) / 4 * spread, subnormal)


def _partners(rotated: int | None, interleaved: bool, path: str, columns: int) -> np.ndarray:
    """Return, for each column of a rotated norm, the index of the other column of its pair.

    For a column that is not rotated, this is its own index.

    Args:
      rotated: number of leading columns that are rotated; None for all.
      interleaved: True if a pair is two adjacent columns, False if it is one column of each half
        of the rotated columns.
      path, columns: path of the norm (for an error message), and its number of columns.
    """
    count = columns if rotated is None else rotated
    if count % 2 or not 0 <= count <= columns:
        raise ValueError(
            f"check_params: {path} has {columns} columns, and rotated_columns={rotated}; expected "
            f"an even number of at most {columns}"
        )
    indices = np.arange(columns)
    pairs = indices[:count].reshape((-1, 2) if interleaved else (2, -1))
    indices[:count] = np.flip(pairs, 1 if interleaved else 0).ravel()
    return indices


def _floor_of(y_dtype: np.dtype) -> float | None:
    """Return the least |scale| that a norm uses if it saves its output.

    The norm replaces a smaller |scale| by this value. The result is None if there is no limit (for
    float16).
    """
    float32 = np.dtype(np.float32)
    return Spec(
        "norm", "fwd", 1, 1, float32, y_dtype, ("y",), NormOptions(scale_dtype=float32)
    ).scale_floor


def _host(name: str, path: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(
            f"check_params: {path}/{name} is a {type(value).__name__}; expected an array with its "
            "values, from which its verdict is computed"
        )
    if array.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"check_params: {path}/{name} has dtype {array.dtype.name}; expected one of "
            f"{', '.join(FLOAT_DTYPES)}"
        )
    return array.astype(np.float64)


def _flat(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[_Path, Any]:
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        flat[tuple(re.split("[./]", name)) if path else ()] = leaf
    return flat


def _is_norm(node: Any) -> bool:
    """Return True for a module that has a weight and whose class has "norm" in its name."""
    is_container = isinstance(node, (Mapping, list, tuple))
    return not is_container and "norm" in type(node).__name__.lower() and hasattr(node, "weight")


def _is_scale(name: str, leaf: Any, bias: Any, is_in_norm: bool) -> bool:
    """Return True if a leaf with one of the names of scales is the scale of a norm."""
    shape = np.shape(leaf)
    if name != "weight":
        return name == "scale" or (is_in_norm and bool(shape))
    if bias is not None or not shape:
        return bool(shape) and np.shape(bias) == shape
    return len(shape) == 1 or is_in_norm
