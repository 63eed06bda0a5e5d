"""``python -m jaxnorm --check``: test every public function, forward and backward, on this machine.

Results and gradients are compared with those of `references`, plain JAX in float64. An error is
divided by its bound, so that a quotient above 1 means a wrong result.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm.tools import references
from jaxnorm.tools.plan import calls_in, is_differentiated
from jaxnorm.tools.text import progress, table
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, PARAMETERS, Family

DTYPES = ("float32", "bfloat16")
_WORKERS = min(8, os.cpu_count() or 1)
# The platforms on which cases run in several processes. Threads would not help, because kernels are
# lowered in Python, which runs one thread at a time. (Only one process can use a TPU.)
_IN_PROCESSES = {"cuda"}
# XLA's options for each platform. They skip the autotuning of matmuls, which takes time and does
# not affect correctness.
_OPTIONS = {"cuda": {"xla_gpu_autotune_level": "0"}}

# The shape of x for norms and softmaxes. All kernels support this number of rows. A row's size is a
# multiple of 16 bytes, and its number of columns is not a power of two.
_X = (2, 128, 1000)
# The shape of x for norms with a rotation: (batch, length, heads, columns).
_HEADS = (2, 64, 4, 128)
_ROWS, _FEATURES, _CLASSES = 256, 384, 1000

# To estimate rounding errors, the operands are changed at random, `_CHANGES` times. A bound is
# `_SAFETY` times the estimate, so that no error in a large array exceeds its bound by chance.
_CHANGES, _SAFETY = 8, 4.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a public function that is checked.

    Attributes:
      function: name of the function.
      shapes: a dict that maps the names of the operands to their shapes.
      options: other arguments of the function. The formula in `references` takes them as well,
        except for ``implementation``.
      note: short text that distinguishes the case from the function's other cases.
    """

    function: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.function} {self.note}".rstrip()

    @property
    def call(self) -> Callable[..., Any]:
        return functools.partial(getattr(jaxnorm, self.function), **self.options)

    @property
    def reference(self) -> Callable[..., Any]:
        """The formula in `references` that has the name of the operation or of the function."""
        name = self.function
        options = {n: value for n, value in self.options.items() if n != "implementation"}
        formula = getattr(references, FUNCTIONS[name].op if name in FUNCTIONS else name)
        return functools.partial(formula, **options)


def _norm(function: str) -> tuple[Case, ...]:
    """Return the cases of a norm.

    They have all operands that the norm supports, except the bias of an RMSNorm, which few models
    use.
    """
    kinds = {name: OPERANDS[name] for name in OPERATIONS[FUNCTIONS[function].op].operands}
    if "table" in kinds.values():
        return _rotated_norm(function)
    if not FUNCTIONS[function].subtract_mean:
        kinds.pop("bias", None)
    shapes = {name: _X[-1:] if kind in PARAMETERS else _X for name, kind in kinds.items()}
    case = Case(function, shapes)
    cases = [case]
    if FUNCTIONS[function].gated is not None:
        cases.append(Case(function, shapes | {"gate": _X[-1:]}, note="gate"))
    if FUNCTIONS[function].op == "norm":
        cases.append(dataclasses.replace(case, options={"activation": "silu"}, note="silu"))
    return tuple(cases)


def _rotated_norm(function: str) -> tuple[Case, ...]:
    """Return two cases of a norm with a rotation: of all columns, and of half of the columns."""
    _, length, _, cols = _HEADS

    def shapes(rotated: int) -> dict[str, tuple[int, ...]]:
        table = (length, 1, rotated // 2)
        return {"x": _HEADS, "scale": (cols,), "cos": table, "sin": table}

    half = Case(function, shapes(cols // 2), {"interleaved": True}, "interleaved, partial")
    return Case(function, shapes(cols)), half


def _softmax(function: str) -> tuple[Case, ...]:
    masked, biased = {"x": _X, "where": (2, 1, _X[-1])}, {"x": _X, "bias": _X[1:]}
    return (
        Case(function, {"x": _X}),
        Case(function, masked, note="where"),
        Case(function, biased, {"scale": 0.37}, note="scale, bias"),
        Case(function, {"x": _X}, {"causal": True}, note="causal"),
    )


_LOGITS = {"logits": (_ROWS, _CLASSES), "labels": (_ROWS,)}
_LAYER = {
    "x": (_ROWS, _FEATURES),
    "weight": (_FEATURES, _CLASSES),
    "bias": (_CLASSES,),
    "labels": (_ROWS,),
}


def _loss(function: str) -> tuple[Case, ...]:
    if "teacher_logits" in OPERATIONS[FUNCTIONS[function].op].operands:
        case = Case(function, dict.fromkeys(("logits", "teacher_logits"), _LOGITS["logits"]))
        return case, dataclasses.replace(case, options={"reverse": True}, note="reverse")
    case = Case(function, _LOGITS)
    if FUNCTIONS[function].several is None:
        return (case,)
    labels = _LOGITS | {"labels": (_ROWS, 4)}
    return case, Case(function, labels, note="several labels")


_OF_FAMILY: dict[Family, Callable[[str], tuple[Case, ...]]] = {
    "softmax": _softmax,
    "norm": _norm,
    "loss": _loss,
}


def cases_of(function: str) -> tuple[Case, ...]:
    """Return the cases of a public function that is in the table of operations."""
    return _OF_FAMILY[OPERATIONS[FUNCTIONS[function].op].family](function)


_OF_LAYER = {name: _LAYER[name] for name in ("x", "weight", "bias")}
CASES = (
    *(case for function in FUNCTIONS for case in cases_of(function)),
    Case("rms_norm_linear", {"scale": (_FEATURES,), **_OF_LAYER}),
    Case("gated_linear", {"gate": _LAYER["x"], "up": _LAYER["x"], "weight": _LAYER["weight"]}),
    Case(
        "activation_linear",
        {name: _LAYER[name] for name in ("x", "weight")},
        {"activation": "silu"},
    ),
    Case("linear_softmax_cross_entropy", _LAYER),
    Case("linear_log_prob_and_entropy", _LAYER),
    Case(
        "linear_kl_divergence",
        {
            **_OF_LAYER,
            "teacher_x": (_ROWS, 2 * _FEATURES),
            "teacher_weight": (2 * _FEATURES, _CLASSES),
        },
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a case in one dtype.

    Attributes:
      case, dtype: the case, and the dtype of its operands.
      implementations: names of the implementations that ran the passes.
      value: the largest ``error / bound`` of all elements of the results.
      gradient: the largest ``error / bound`` of all elements of the gradients.
      failure: the error, if the case raised one; otherwise "".
    """

    case: Case
    dtype: str
    implementations: tuple[str, ...]
    value: float = math.nan
    gradient: float = math.nan
    failure: str = ""

    @property
    def has_kernel(self) -> bool:
        # For a linear loss, `implementations` is empty: its kernels are chosen during the lowering.
        return not {*self.implementations} <= {"xla"}

    @property
    def is_right(self) -> bool:
        return not self.failure and max(self.value, self.gradient) <= 1

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = "right" if self.is_right else self.failure or "WRONG"
        errors = ("-", "-") if self.failure else (f"{self.value:.2f}", f"{self.gradient:.2f}")
        return str(self.case), self.dtype, ", ".join(self.implementations), *errors, verdict


def run() -> list[Outcome]:
    """Run all cases in all dtypes, and return their outcomes in order."""
    pairs = [(case, dtype) for case in CASES for dtype in DTYPES]
    names = [f"{case}, {dtype}" for case, dtype in pairs]
    with _pool() as pool:
        outcomes = pool.map(check, *zip(*pairs))
        return [outcome for _, outcome in zip(progress(names), outcomes)]


def _pool() -> Executor:
    """Return a pool of workers, which compile and run cases in parallel."""
    platform = backends.local_platform()
    if platform not in _IN_PROCESSES:
        return ThreadPoolExecutor(_WORKERS)
    # Spawn processes, because a fork would copy locks that JAX's threads hold.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(_WORKERS, context, _start, (platform,))


def _start(platform: str) -> None:
    """Initialise a worker process so that it raises an error if JAX does not find `platform`."""
    jax.config.update("jax_platforms", f"{platform},cpu")  # the CPU computes in float64


class Operands(NamedTuple):
    """The arrays with which a case is run.

    Attributes:
      floats: a dict that maps names to the operands that are differentiated.
      constants: a dict that maps names to the other operands.
      cotangents: cotangents of the results.
    """

    floats: dict[str, jax.Array]
    constants: dict[str, jax.Array]
    cotangents: list[jax.Array]


#: A function that runs both passes of a call. It returns the results, and a dict of gradients.
Passes = Callable[[Operands], tuple[list[jax.Array], dict[str, jax.Array]]]


def passes(call: Callable[..., Any]) -> Passes:
    """Return a function that runs both passes of a call, without compiling it."""

    def run(operands: Operands) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        def results(floats: dict[str, jax.Array]) -> list[jax.Array]:
            return jax.tree.leaves(call(**floats, **operands.constants))

        y, pullback = jax.vjp(results, operands.floats)
        (gradients,) = pullback(operands.cotangents)
        return y, gradients

    return run


def operands_of(case: Case, dtype: str) -> tuple[Operands, dict[str, Any], dict[str, Any]]:
    """Return a case's operands and cotangents, in `dtype` and in float64.

    The result has three elements:

    - the operands and the cotangents in `dtype`;
    - a dict of the operands in float64;
    - a dict of the cotangents in float64, in the order of the results.
    """
    given = references.operands(case.shapes, _CLASSES, seed=0)
    arrays = {n: jnp.asarray(a, dtype if a.dtype == np.float64 else None) for n, a in given.items()}
    floats = {name: a for name, a in arrays.items() if is_differentiated(name, a)}
    constants = {name: a for name, a in arrays.items() if name not in floats}
    types = jax.tree.leaves(jax.eval_shape(case.call, **arrays))
    along = references.operands({str(i): t.shape for i, t in enumerate(types)}, 0, seed=1)
    cotangents = [jnp.asarray(d, t.dtype) for d, t in zip(along.values(), types)]
    return Operands(floats, constants, cotangents), given, along


def check(
    case: Case,
    dtype: str,
    form: Callable[[Passes], Passes] = lambda run: run,
    read: Callable[[np.ndarray], np.ndarray] = lambda a: a,
) -> Outcome:
    """Run a case and return its largest errors.

    Args:
      case: the case.
      dtype: dtype of its float operands.
      form: a decorator of the function that runs both passes of the case. Tests use it to run the
        case under `jax.vmap` or on a mesh.
      read: a function that extracts the case's part from an array that the wrapped function
        returns. For example, if `form` applies `jax.vmap`, `read` returns the array of one batch
        element.
    """
    options = _OPTIONS.get(backends.local_platform())
    both = jax.jit(form(passes(case.call)), compiler_options=options)
    # float32 matmuls must not use TensorFloat-32, which is the default on a GPU.
    with jax.default_matmul_precision("highest"):
        operands, given, along = operands_of(case, dtype)
        program = both.trace(operands).jaxpr
        choices = _choices(program)
        implementations = tuple(choice.name for choice in choices)
        try:
            results, gradients = jax.tree.map(read, jax.device_get(both(operands)))
        except Exception as error:  # report a kernel that does not compile or start
            said = str(error).strip().partition("\n")[0]
            return Outcome(case, dtype, implementations, failure=f"{type(error).__name__}: {said}")
    for before, now in zip(choices, _choices(program), strict=True):
        if before.name != now.name:  # the kernel could not be lowered
            return Outcome(case, dtype, implementations, failure=now.reason.partition("\n")[0])
    values, errors = _expected(case, dtype, operands, given, along)
    value, gradient = (
        max(map(_worst, *map(jax.tree.leaves, arrays)))
        for arrays in zip((results, gradients), values, errors)
    )
    return Outcome(case, dtype, implementations, value, gradient)


def _expected(
    case: Case, dtype: str, operands: Operands, given: dict[str, Any], along: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the results and gradients of both passes in float64, and bounds on their errors.

    Rounding errors have the same effect as small random changes of the float operands and the
    cotangents. So the float operands and cotangents are changed several times. The relative size u
    of a change is the unit roundoff of the arrays that the computation stores, plus the roundoff of
    a float32 sum. (The rounding errors of a sum add up like a random walk.) The bound for an
    element of a result is `_SAFETY` times a sum of three terms: the root mean square of the
    element's changes; u times the element; and u times the root mean square of the result, because
    terms may cancel in the element.
    """
    both = jax.jit(passes(case.reference))
    constants = {name: given[name] for name in operands.constants}
    changed = {name: given[name] for name in operands.floats}, [*along.values()]
    # The operands of a matmul are stored in `dtype`. Without a matmul, only results are stored, and
    # `u` depends on the dtype of the first result.
    stored = dtype if "weight" in case.shapes else operands.cotangents[0].dtype
    terms = max(size for shape in case.shapes.values() for size in shape)
    u = _roundoff(stored) + math.sqrt(terms) * _roundoff("float32")
    random = np.random.default_rng(2)

    def values(size: float) -> Any:
        floats, cotangents = jax.tree.map(
            lambda a: a * (1 + size * random.normal(size=a.shape)), changed
        )
        return jax.device_get(both(Operands(floats, constants, cotangents)))

    with jax.enable_x64(True), _on_a_cpu():
        exact, others = values(0), [values(u) for _ in range(_CHANGES)]

    def error(value: np.ndarray, *others: np.ndarray) -> np.ndarray:
        value = np.where(np.isfinite(value), value, 0)
        moved = np.mean([np.where(np.isfinite(a), a - value, 0) ** 2 for a in others], 0)
        return _SAFETY * (np.sqrt(moved) + u * (np.abs(value) + np.sqrt(np.mean(value**2))))

    return exact, jax.tree.map(error, exact, *others)


def _roundoff(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def _on_a_cpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX runs on the CPU, if the variable JAX_PLATFORMS allows this."""
    with contextlib.suppress(RuntimeError):
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    return contextlib.nullcontext()


def _choices(program: Any) -> list[backends.Choice]:
    """Return the implementations of the calls in a jaxpr on this platform, in order."""
    here = backends.local_platform()
    return [backends.choose(call.as_seen_by, here) for call in calls_in(program)]


def _worst(computed: np.ndarray, value: np.ndarray, error: np.ndarray) -> float:
    """Return the largest ``error / bound`` of all elements of a result.

    The bound is `error`, the error of the arithmetic, plus the rounding to the result's dtype. If
    an element is not finite, but should be, or vice versa, the function returns infinity.
    """
    bound = error + _roundoff(computed.dtype) * np.abs(value)
    computed = np.asarray(computed).astype(np.float64).reshape(value.shape)
    finite = np.isfinite(value)
    if not np.array_equal(computed[~finite], value[~finite]):
        return math.inf
    ratio = np.abs(computed[finite] - value[finite]) / np.maximum(bound[finite], 1e-300)
    return float(np.max(np.where(np.isnan(ratio), math.inf, ratio), initial=0))


def report(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the outcomes."""
    header = ("function", "dtype", "forward, backward", "value", "gradient", "")
    lines = [header, *(outcome.cells for outcome in outcomes)]
    return table(lines, left=(0, 1, 2, 5))
