"""The check of ``python -m jaxnorm --check``: every function on this machine, forward and backward.

Values and gradients are held against `_references`, in units of the bounds that belong to them: a
result of more than 1 is wrong.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm import _references
from jaxnorm._references import Results
from jaxnorm._running_error import Bounded
from jaxnorm._text import progress, table

DTYPES = ("float32", "bfloat16")

# Enough rows for kernels that take no few; of 16 bytes each multiple, and no power of 2.
_X = (2, 128, 1000)
_ROWS, _FEATURES, _CLASSES = 256, 384, 1000

_LOSS = "softmax_cross_entropy_with_integer_labels"
_LINEAR_LOSS = "linear_softmax_cross_entropy"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a public function.

    Attributes:
      function: its name.
      reference: its results and gradients, of `_references`.
      shapes: of its operands, by name.
      options: what else the function and the reference are given.
      plan: what :func:`jaxnorm.implementation_for` is given besides the options.
      note: what is special.
    """

    function: str
    reference: Callable[..., Results]
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.function} {self.note}".rstrip()

    def implementations(self, dtype: str) -> tuple[str, str]:
        """What runs it here, forward and backward."""
        function: Any = _LOSS if self.function == _LINEAR_LOSS else self.function
        shape = (_ROWS, _CLASSES) if "labels" in self.shapes else _X
        chosen = jaxnorm.implementation_for(function, shape, dtype, **self.options, **self.plan)
        return chosen.forward.name, chosen.backward.name


def _norm(function: str, reference: Callable[..., Results], *names: str) -> Case:
    return Case(function, reference, {n: _X if n in ("x", "residual") else _X[-1:] for n in names})


def _softmaxes(function: str, reference: Callable[..., Results]) -> tuple[Case, ...]:
    def case(note: str, *, of: Any = None, options: Any = None, plan: Any = None) -> Case:
        return Case(function, reference, {"x": _X, **(of or {})}, options or {}, plan or {}, note)

    mask, bias = {"where": (2, 1, _X[-1])}, {"bias": _X[1:]}
    return (
        case(""),
        case("where", of=mask, plan={"where": True}),
        case("scale, bias", of=bias, options={"scale": 0.37}, plan={"use_bias": True}),
        case("causal", options={"causal": True}),
    )


_LOGITS = {"logits": (_ROWS, _CLASSES), "labels": (_ROWS,)}
_LAYER = {
    "x": (_ROWS, _FEATURES),
    "weight": (_FEATURES, _CLASSES),
    "bias": (_CLASSES,),
    "labels": (_ROWS,),
}

CASES = (
    *_softmaxes("softmax", _references.softmax),
    *_softmaxes("log_softmax", functools.partial(_references.softmax, log=True)),
    _norm("layer_norm", _references.norm, "x", "scale", "bias"),
    _norm("rms_norm", _references.norm, "x", "scale"),
    _norm("add_layer_norm", _references.add_norm, "x", "residual", "scale", "bias"),
    _norm("add_rms_norm", _references.add_norm, "x", "residual", "scale"),
    _norm("rms_norm_add", _references.norm_add, "x", "residual", "scale"),
    _norm(
        "rms_norm_add_rms_norm",
        _references.norm_add_norm,
        *("x", "residual", "scale", "next_scale"),
    ),
    Case(_LOSS, _references.cross_entropy, _LOGITS),
    Case(_LINEAR_LOSS, _references.linear_cross_entropy, _LAYER),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a case in one dtype: the worst errors, in units of their bounds; or why there are none."""

    case: Case
    dtype: str
    implementations: tuple[str, str]
    value: float = math.nan
    gradient: float = math.nan
    failure: str = ""

    @property
    def has_kernel(self) -> bool:
        return set(self.implementations) != {"xla"}

    @property
    def is_right(self) -> bool:
        return not self.failure and max(self.value, self.gradient) <= 1

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = "right" if self.is_right else self.failure or "WRONG"
        errors = f"{self.value:.2f}", f"{self.gradient:.2f}"
        return str(self.case), self.dtype, ", ".join(self.implementations), *errors, verdict


def run() -> list[Outcome]:
    """All cases in all dtypes."""
    pairs = [_Pair(case, dtype) for case in CASES for dtype in DTYPES]
    # Products of float32 are of float32, and not of TensorFloat-32, which a GPU would take.
    with jax.default_matmul_precision("highest"):
        return [check(case, dtype) for case, dtype in progress(pairs)]


class _Pair(NamedTuple):
    case: Case
    dtype: str

    def __str__(self) -> str:
        return f"{self.case}, {self.dtype}"


def check(case: Case, dtype: str) -> Outcome:
    implementations = case.implementations(dtype)
    try:
        value, gradient = _errors(case, dtype)
    except Exception as error:  # a kernel that does not compile or start is what is looked for
        said = str(error).strip().partition("\n")[0]
        return Outcome(case, dtype, implementations, failure=f"{type(error).__name__}: {said}")
    return Outcome(case, dtype, implementations, value, gradient)


def _errors(case: Case, dtype: str) -> tuple[float, float]:
    """The worst of all results, and of all gradients."""
    given = _references.operands(case.shapes, _CLASSES, seed=0)
    constants = {name: jnp.asarray(a) for name, a in given.items() if a.dtype != np.float64}
    floats = {name: jnp.asarray(a, dtype) for name, a in given.items() if name not in constants}

    def function(floats: dict[str, jax.Array]) -> list[jax.Array]:
        call = getattr(jaxnorm, case.function)
        results: list[jax.Array] = jax.tree.leaves(call(**floats, **constants, **case.options))
        return results

    types = jax.eval_shape(function, floats)
    along = _references.operands({str(i): t.shape for i, t in enumerate(types)}, 0, seed=1)
    cotangents = [jnp.asarray(d, t.dtype) for d, t in zip(along.values(), types)]

    @jax.jit
    def both(floats: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(function, floats)
        return results, *pullback(cotangents)

    results, gradients = jax.device_get(both(floats, cotangents))
    expected, expected_gradients = case.reference(
        {n: a if n in constants else Bounded.exact(a) for n, a in given.items()},
        [Bounded.exact(d) for d in along.values()],
        dtype,
        **case.options,
    )
    return (
        max(_worst(ours, theirs) for ours, theirs in zip(results, expected, strict=True)),
        max(_worst(ours, expected_gradients[name]) for name, ours in gradients.items()),
    )


def _worst(computed: np.ndarray, expected: Bounded) -> float:
    """The largest error in units of its bound; infinite where one of both is not finite."""
    computed = np.asarray(computed).astype(np.float64)
    value, bound = (a.reshape(computed.shape) for a in (expected.value, expected.error))
    finite = np.isfinite(value)
    if not np.array_equal(computed[~finite], value[~finite]):
        return math.inf
    error = np.abs(computed[finite] - value[finite])
    # 0 / 0 where an element is masked, and exactly 0.
    ratio = np.where(error == 0, 0, error / np.maximum(bound[finite], 1e-300))
    return float(np.max(np.where(np.isnan(ratio), math.inf, ratio), initial=0))


def report(outcomes: Sequence[Outcome]) -> str:
    """A table of them."""
    header = ("function", "dtype", "forward, backward", "value", "gradient", "")
    lines = [header, *(outcome.cells for outcome in outcomes)]
    return table(lines, left=(0, 1, 2, 5))
