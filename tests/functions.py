"""The table of functions: calls of public functions, their operands, and formulas in plain JAX.

The tests of values, batches, programs, rematerialisation and meshes run over this table. A function
is tested by all of them as soon as it has an entry.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from norms import composed

import jaxnorm


class Sizes(NamedTuple):
    """Sizes of operands.

    Attributes:
      rows: the sizes of x's axes before its last axis. The last of these sizes is the number of
        attention heads.
      cols: the size of the last axis of x.
      features: the number of output features of a matmul. It is also the number of classes.
    """

    rows: tuple[int, ...] = (4, 2)
    cols: int = 8
    features: int = 24


class Function(NamedTuple):
    """A call of a public function.

    Attributes:
      ours: a function of the operands and of options such as `implementation`. It calls jaxnorm.
      plain: the same formula in plain JAX.
      kinds: a string with the kind of each operand (a key of `SHAPES`), separated by spaces.
        Operands with floating-point values are differentiated.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    kinds: str


# Maps each kind of operand to the function that returns its shape.
SHAPES: dict[str, Callable[[Sizes], tuple[int, ...]]] = {
    **dict.fromkeys(["x", "residual", "gate"], lambda s: (*s.rows, s.cols)),
    **dict.fromkeys(["scale", "bias", "branch"], lambda s: (s.cols,)),
    **dict.fromkeys(["cos", "sin"], lambda s: (s.rows[0], *[1] * (len(s.rows) - 1), s.cols // 2)),
    "logits_bias": lambda s: (1, *s.rows[1:], s.cols),
    "mask": lambda s: (s.rows[0], *[1] * (len(s.rows) - 1), s.cols),
    "of_samples": lambda s: (s.rows[0], *[1] * (len(s.rows) - 1), s.cols),
    "of_groups": lambda s: (s.rows[-1], 1, s.cols),
    "of_heads": lambda s: (s.rows[-1], s.cols),
    "weight": lambda s: (s.cols, s.features),
    "feature_bias": lambda s: (s.features,),
    **dict.fromkeys(["logits", "classes"], lambda s: (*s.rows, s.features)),
    **dict.fromkeys(["labels", "counts"], lambda s: s.rows),
    "candidates": lambda s: (*s.rows, 3),
}


def operand(kind: str, seed: int = 0, sizes: Sizes = Sizes()) -> np.ndarray:  # noqa: B008
    """Return an operand of this kind as a NumPy array: float64, int32 (labels) or bool (masks)."""
    shape = SHAPES[kind](sizes)
    if kind in ("labels", "candidates", "counts"):
        labels = (np.arange(np.prod(shape)) % sizes.features).reshape(shape).astype(np.int32)
        return labels % 3 > 0 if kind == "counts" else labels
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    if kind in ("mask", "classes"):
        return (values < 0.5) | (np.arange(shape[-1]) == 1)
    # Scales are near 1. Elements of the rotary tables are between -1 and 1.
    centres = {"scale": 1 + values / 10, "cos": np.cos(values), "sin": np.sin(values)}
    centres |= {"weight": values / np.sqrt(shape[0]), "of_samples": 1 + values / 4}
    centres |= dict.fromkeys(("of_groups", "of_heads"), 1 + values / 10)
    return centres.get(kind, values)


# ----------------------------------------------------------------------------------- plain formulas


def norm_of(name, names, kinds=None, used=(0, 1), axis=-1, save=None, **options):
    """Return the `Function` of a norm.

    Args:
      names: the names of the operands, separated by spaces. An entry of `SHAPES` has the name.
      kinds: the kinds of the operands, if they are not their names.
      used: the indices of the results that the call returns.
    """
    given = {"axis": axis} if axis != -1 else {}
    given |= {"save": save} if save else {}
    axes = tuple(np.atleast_1d(axis).tolist())

    def of_results(results):
        results = [results[i] for i in used if i < len(results)]
        return tuple(results) if len(results) > 1 else results[0]

    def ours(*a, **o):
        results = getattr(jaxnorm, name)(**dict(zip(names.split(), a)), **given, **options, **o)
        return of_results(results) if isinstance(results, tuple) else results

    def plain(*a):
        gated = {"activation": "silu"} if name == "rms_norm_gated" else {}
        return of_results(composed(name, axes, **dict(zip(names.split(), a)), **gated | options))

    return Function(ours, plain, kinds or names)


def capped(logits, cap=None):
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def losses(logits, labels, counts, smoothing=0.0, z_loss=0.0, cap=None):
    logits = capped(logits, cap)
    lse = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    loss = lse - (1 - smoothing) * chosen - smoothing * logits.mean(-1) + z_loss * lse**2
    return loss * counts


def losses_of_classes(logits, labels, classes):
    one_hot = jnp.arange(logits.shape[-1]) == labels[..., None]
    lse = jax.nn.logsumexp(logits, -1, where=classes)
    return lse - jnp.sum(logits, -1, where=one_hot)


def log_prob_and_entropy(logits, labels, counts, cap=None):
    log_p = jax.nn.log_softmax(capped(logits, cap))
    chosen = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    return chosen * counts, -jnp.sum(jnp.exp(log_p) * log_p, -1) * counts


def of_candidates(logits, candidates, counts):
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, candidates, -1)
    return chosen * counts[..., None], -jnp.sum(jnp.exp(log_p) * log_p, -1) * counts


def scales_of(labels):
    """Return a `logits_scale` with one value per position, computed from the labels."""
    return 1 / (1 + jnp.asarray(labels % 3, jnp.float32))


def scaled(logits, labels):
    return logits * scales_of(labels)[..., None].astype(logits.dtype)


def layer_of_a_teacher(labels, weight):
    """Return a teacher's hidden states (one row per position) and the weight of its last layer.

    Both are constants: neither depends on an operand that is differentiated.
    """
    features = jnp.arange(5, dtype=weight.dtype)
    classes = jnp.arange(weight.shape[1], dtype=weight.dtype)
    of_rows = jnp.asarray(labels, weight.dtype)[..., None]
    x = jnp.cos(of_rows + jnp.expand_dims(features, [*range(labels.ndim)]))
    return x, jnp.sin(features[:, None] * classes[None])


def bias_of_a_teacher(weight):
    return jnp.cos(jnp.arange(weight.shape[1], dtype=weight.dtype))


def teacher_of(logits):
    """Return constant logits of a teacher."""
    return jnp.cos(3 * jax.lax.stop_gradient(logits))


def divergences(logits, teacher_logits, counts=1.0, classes=None, *, reverse=False, cap=None):
    teacher = jax.lax.stop_gradient(teacher_logits)
    log_q, log_p = (jax.nn.log_softmax(capped(z, cap), where=classes) for z in (logits, teacher))
    first, second = (log_q, log_p) if reverse else (log_p, log_q)
    return jnp.sum(jnp.exp(first) * (first - second), -1, where=classes) * counts


def causal_softmax(x, bias):
    reached = jnp.tril(jnp.ones(x.shape[-2:], bool))
    return jax.nn.softmax(0.5 * x + bias, where=reached)


# -------------------------------------------------------------------------------------------- calls

_cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels


def calling(name, names, **options):
    """Return a function of operands that passes them to a public function by the names `names`."""

    def call(*operands, **more):
        named = dict(zip(names.split(), operands, strict=True))
        return getattr(jaxnorm, name)(**named, **options, **more)

    return call


def of_logits(name, plain, kinds="logits labels counts", **options):
    """Return the `Function` of a loss of logits. Its operands are logits, labels and a mask."""
    return Function(calling(name, "logits labels where", **options), plain, kinds)


def of_linear(name, of_rows, labels="labels", mean=False, **options):
    """Return the `Function` of a loss of the logits ``x @ weight + bias``.

    ``of_rows(logits, labels, counts)`` is the loss of each row in plain JAX. `labels` is the kind
    of the labels.
    """
    if isinstance(name, str):
        ours = calling(name, "x weight bias labels where", chunk=3, **options)
    else:
        ours = name

    def plain(x, w, b, labels, counts):
        each = of_rows(x @ w + b, labels, counts)
        return each.sum() / counts.sum() if mean else each

    return Function(ours, plain, f"x weight feature_bias {labels} counts")


def focal_loss(logits, label, losses=_cross_entropy):
    """Compute a focal loss from the logits and the label of one position."""
    loss = losses(logits, label)
    return loss * jnp.exp(-loss)


plain_focal_loss = functools.partial(
    focal_loss, losses=lambda logits, label: jax.nn.logsumexp(logits) - logits[label]
)


def of_positions(fun, logits, labels, counts):
    """Compute a loss of each position; losses of masked positions are 0."""
    for _ in labels.shape:
        fun = jax.vmap(fun)
    return fun(logits, jnp.maximum(labels, 0)) * counts


def tempered_loss(logits, label, teacher, temperature):
    """Compute a cross-entropy with a penalty for a teacher's classes, in plain JAX."""
    z = logits / (1 + temperature**2)
    return jax.nn.logsumexp(z) - z[label] + jnp.sum(jax.nn.softmax(teacher) * z)


def tempered(x, w, scale, teacher, labels, counts):
    """Return `jaxnorm.linear_loss` of a function that closes over an array and has two rows."""
    return jaxnorm.linear_loss(
        *(lambda *row: tempered_loss(*row, scale[0]), x, w, labels, teacher),
        **{"where": counts, "chunk": 3},
    )


def plain_tempered(x, w, scale, teacher, labels, counts):
    fun = functools.partial(tempered_loss, temperature=scale[0])
    for _ in labels.shape:
        fun = jax.vmap(fun)
    return jnp.sum(fun(x @ w, labels, teacher) * counts) / counts.sum()


def _any_linear(fun, x, w, b, labels, counts, **options):
    return jaxnorm.linear_loss(fun, x, w, labels, bias=b, where=counts, chunk=3, **options)


ROPE = norm_of("rms_norm_rope", "x scale cos sin")
rms_norm = norm_of("rms_norm", "x scale").plain

CROSS_ENTROPY = "softmax_cross_entropy_with_integer_labels"

# The first word of each key is the name of the public function.
FUNCTIONS = {
    "softmax": Function(jaxnorm.softmax, jax.nn.softmax, "x"),
    "softmax with a mask": Function(
        calling("softmax", "x where"),
        lambda x, mask: jax.nn.softmax(x, where=mask),
        "x mask",
    ),
    "softmax with a bias": Function(
        calling("softmax", "x bias", scale=0.5, causal=True),
        causal_softmax,
        "x logits_bias",
    ),
    "log_softmax": Function(jaxnorm.log_softmax, jax.nn.log_softmax, "x"),
    "layer_norm": norm_of("layer_norm", "x scale bias"),
    "layer_norm from input": norm_of("layer_norm", "x scale bias", save="input"),
    "layer_norm silu": norm_of("layer_norm", "x scale bias", activation="silu"),
    "layer_norm of samples": norm_of("layer_norm", "x scale bias", "x of_samples of_samples"),
    "layer_norm of groups": norm_of(
        "layer_norm", "x scale bias", "x of_groups of_groups", axis=(-3, -1)
    ),
    "rms_norm": norm_of("rms_norm", "x scale"),
    "rms_norm from input": norm_of("rms_norm", "x scale", save="input"),
    "add_layer_norm": norm_of("add_layer_norm", "x residual scale bias"),
    "add_layer_norm with a gate": norm_of(
        "add_layer_norm",
        "x residual scale bias gate",
        "x residual of_samples of_samples of_samples",
    ),
    "add_layer_norm of which h alone is used": norm_of(
        "add_layer_norm",
        "x residual scale bias gate",
        "x residual scale bias of_samples",
        used=[1],
    ),
    "add_layer_norm of which y alone is used": norm_of(
        "add_layer_norm",
        "x residual scale bias gate",
        "x residual of_samples of_samples branch",
        used=[0],
        save="input",
    ),
    "add_rms_norm": norm_of("add_rms_norm", "x residual scale"),
    "add_rms_norm with a gate": norm_of(
        "add_rms_norm", "x residual scale gate", "x residual scale branch", save="input"
    ),
    "rms_norm_add": norm_of("rms_norm_add", "x residual scale"),
    "rms_norm_add_rms_norm": norm_of(
        "rms_norm_add_rms_norm", "x residual scale next_scale", "x residual scale scale"
    ),
    "rms_norm_gated": norm_of("rms_norm_gated", "x gate scale"),
    "rms_norm_gated gate first": norm_of(
        "rms_norm_gated", "x gate scale", norm_before_gate=False, activation="gelu"
    ),
    "rms_norm_gated of heads": norm_of("rms_norm_gated", "x gate scale", "x gate of_heads"),
    "rms_norm_rope": ROPE,
    "rms_norm_rope of constant tables": ROPE._replace(
        ours=lambda x, s, *tables, **o: ROPE.ours(x, s, *map(jax.lax.stop_gradient, tables), **o),
        plain=lambda x, s, *tables: ROPE.plain(x, s, *map(jax.lax.stop_gradient, tables)),
    ),
    "rms_norm_rope from input": norm_of(
        "rms_norm_rope", "x scale cos sin", save="input", interleaved=True
    ),
    "rms_norm_linear": Function(
        jaxnorm.rms_norm_linear, lambda x, w, s: rms_norm(x, s) @ w, "x weight scale"
    ),
    "rms_norm_linear silu": Function(
        calling("rms_norm_linear", "x weight scale bias residual", activation="silu"),
        lambda x, w, s, b, residual: (
            jax.nn.silu(rms_norm(x + residual, s) @ w + b),
            x + residual,
        ),
        "x weight scale feature_bias residual",
    ),
    "gated_linear": Function(
        calling("gated_linear", "gate up weight bias"),
        lambda gate, up, w, b: (jax.nn.silu(gate) * up) @ w + b,
        "gate x weight feature_bias",
    ),
    "activation_linear": Function(
        calling("activation_linear", "x weight bias"),
        lambda x, w, b: jax.nn.gelu(x) @ w + b,
        "x weight feature_bias",
    ),
    CROSS_ENTROPY: of_logits(CROSS_ENTROPY, functools.partial(losses, z_loss=0.1), z_loss=0.1),
    f"{CROSS_ENTROPY} of classes": of_logits(
        CROSS_ENTROPY, losses_of_classes, "logits labels classes"
    ),
    f"{CROSS_ENTROPY} capped": of_logits(
        CROSS_ENTROPY,
        functools.partial(losses, smoothing=0.1, cap=3.0),
        label_smoothing=0.1,
        logit_softcap=3.0,
    ),
    "log_prob_and_entropy": of_logits("log_prob_and_entropy", log_prob_and_entropy),
    "log_prob_and_entropy of several": of_logits(
        "log_prob_and_entropy", of_candidates, "logits candidates counts"
    ),
    f"{CROSS_ENTROPY} of scales": Function(
        lambda logits, labels, counts, **o: _cross_entropy(
            logits, labels, where=counts, logits_scale=scales_of(labels), **o
        ),
        lambda logits, labels, counts: losses(scaled(logits, labels), labels, counts),
        "logits labels counts",
    ),
    "kl_divergence": Function(
        lambda logits, counts, **o: jaxnorm.kl_divergence(
            logits, teacher_of(logits), where=counts, **o
        ),
        lambda logits, counts: divergences(logits, teacher_of(logits), counts),
        "logits counts",
    ),
    "kl_divergence reverse": Function(
        lambda logits, classes, **o: jaxnorm.kl_divergence(
            logits,
            teacher_of(logits),
            where=classes,
            reverse=True,
            logit_softcap=3.0,
            teacher_logit_softcap=3.0,
            **o,
        ),
        lambda logits, classes: divergences(
            logits, teacher_of(logits), classes=classes, reverse=True, cap=3.0
        ),
        "logits classes",
    ),
    "linear_softmax_cross_entropy": of_linear("linear_softmax_cross_entropy", losses, mean=True),
    "linear_softmax_cross_entropy of rows": of_linear(
        "linear_softmax_cross_entropy",
        functools.partial(losses, smoothing=0.1, z_loss=0.1),
        reduction="none",
        label_smoothing=0.1,
        z_loss=0.1,
    ),
    "linear_log_prob_and_entropy": of_linear(
        "linear_log_prob_and_entropy",
        functools.partial(log_prob_and_entropy, cap=3.0),
        logit_softcap=3.0,
    ),
    "linear_log_prob_and_entropy of several": of_linear(
        "linear_log_prob_and_entropy", of_candidates, "candidates"
    ),
    "linear_loss": of_linear(
        functools.partial(_any_linear, focal_loss),
        functools.partial(of_positions, plain_focal_loss),
        mean=True,
    ),
    "linear_loss in plain JAX": Function(
        tempered, plain_tempered, "x weight scale logits labels counts"
    ),
    "linear_loss of rows": of_linear(
        functools.partial(_any_linear, focal_loss, reduction="none"),
        functools.partial(of_positions, plain_focal_loss),
    ),
    "linear_kl_divergence": Function(
        lambda x, w, b, labels, counts, **o: jaxnorm.linear_kl_divergence(
            x, w, *layer_of_a_teacher(labels, w), bias=b, where=counts, chunk=3, **o
        ),
        lambda x, w, b, labels, counts: (
            divergences(x @ w + b, jnp.matmul(*layer_of_a_teacher(labels, w)), counts).sum()
            / counts.sum()
        ),
        "x weight feature_bias labels counts",
    ),
    "linear_kl_divergence of rows": Function(
        lambda x, w, b, labels, counts, **o: jaxnorm.linear_kl_divergence(
            *(x, w, *layer_of_a_teacher(labels, w)),
            bias=b,
            teacher_bias=bias_of_a_teacher(w),
            where=counts,
            chunk=3,
            reduction="none",
            reverse=True,
            logits_scale=scales_of(labels),
            **o,
        ),
        lambda x, w, b, labels, counts: divergences(
            scaled(x @ w + b, labels),
            scaled(jnp.matmul(*layer_of_a_teacher(labels, w)) + bias_of_a_teacher(w), labels),
            counts,
            reverse=True,
        ),
        "x weight feature_bias labels counts",
    ),
}
#: A selection of the keys of `FUNCTIONS`. Most public functions occur once. A function occurs twice
#: if some of its options select another operation: once without and once with these options.
BASIC = [*{name.split()[0]: name for name in reversed(FUNCTIONS)}.values()][::-1]
# Use the entry whose rotary tables are constants. If their gradients were needed, XLA's code would
# run instead of kernels.
BASIC[BASIC.index("rms_norm_rope")] += " of constant tables"
BASIC += ["layer_norm silu", "add_layer_norm with a gate", "linear_softmax_cross_entropy of rows"]
#: Keys of entries that differ from another entry only in one option.
VARIANTS = {name for name in FUNCTIONS if " from input" in name or " gate first" in name}

#: Public functions that have no derivatives, or whose first argument is a function.
OTHERS = {
    *("auto_remat", "check_params", "fit_memory", "implementation_for"),
    *("linear_loss", "memory_report", "remat_plan"),
}


def public_functions() -> set[str]:
    functions = {n for n in jaxnorm.__all__ if inspect.isfunction(getattr(jaxnorm, n))}
    return functions - {"save_policy"}


def operands_of(
    name: str,
    dtype: str = "float32",
    sizes: Sizes = Sizes(),  # noqa: B008
    table: dict[str, Function] = FUNCTIONS,
) -> tuple[Any, ...]:
    """Return the operands of the entry `name`: floats in `dtype`, and then labels and masks."""
    arrays = (operand(k, i, sizes) for i, k in enumerate(table[name].kinds.split()))
    return tuple(jax.device_put(a.astype(dtype)) if a.dtype == np.float64 else a for a in arrays)


def of_floats(function: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `function` as a function of its floating-point operands, which come first.

    The other operands (labels and masks) are fixed to their values in `operands`.
    """
    others = [a for a in operands if not jnp.issubdtype(a.dtype, jnp.floating)]
    return lambda *floats: function(*floats, *others)


def step_of(name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that computes the results of function `name` and its gradients.

    The gradients are those with respect to all float operands. The cotangents are the cosines of
    the results.
    """

    def step(*operands):
        floats = [operands[i] for i in floats_in(operands)]
        function = functools.partial(FUNCTIONS[name].ours, **options)
        y, pullback = jax.vjp(of_floats(function, operands), *floats)
        return jax.tree.leaves(y), list(pullback(jax.tree.map(jnp.cos, y)))

    return step


def call_of(name: str, dtype: str = "float32", sizes: Sizes = Sizes()) -> tuple[Any, Any]:  # noqa: B008
    """Return two things: a function that runs the call of the entry `name`, and its arguments.

    The arguments are the operands with floating-point values. The other operands are fixed.
    """
    operands = operands_of(name, dtype, sizes)
    floats = tuple(a for a in operands if jnp.issubdtype(a.dtype, jnp.floating))
    return of_floats(FUNCTIONS[name].ours, operands), floats


def scalar(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes one number, which depends on every element of all results."""

    def of_result(y):
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return lambda *a: sum(map(of_result, jax.tree.leaves(function(*a))))


def floats_in(operands: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(operands) if jnp.issubdtype(a.dtype, jnp.floating))


def gradients(function: Callable[..., Any], wrt: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that computes the gradients of `scalar(function)`.

    The gradients are with respect to the operands at the indices `wrt`.
    """
    return jax.grad(scalar(function), wrt)


#: Maps the name of each required argument to a value. A name means the same in all functions.
ARGUMENTS = {
    **dict.fromkeys(
        ["teacher_logits", "x", "logits", "residual", "gate", "up"], np.ones((4, 8), np.float32)
    ),
    "weight": np.ones((8, 8), np.float32),
    "scale": np.ones(8, np.float32),
    "teacher_x": np.ones((4, 8), np.float32),
    "teacher_weight": np.ones((8, 8), np.float32),
    **dict.fromkeys(["cos", "sin"], np.ones((4, 4), np.float32)),
    "labels": np.zeros(4, np.int32),
}


def plain_call_of(name: str) -> Any:
    """Return a public function with its required arguments already passed, as JAX arrays."""
    function = getattr(jaxnorm, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    return functools.partial(function, **{n: jnp.asarray(ARGUMENTS[n]) for n in needed})


def options_of(name: str) -> dict[str, Any]:
    """Return a public function's optional arguments: a dict from their names to their defaults."""
    parameters = inspect.signature(getattr(jaxnorm, name)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
