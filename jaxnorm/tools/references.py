"""References of the public functions and their gradients, for ``--check`` and for the tests.

They are written in NumPy, by hand from the equations, and share no code with the functions that
they check. A reference has the name of the operation, or of the public function, that it checks.
Its first three arguments are the operands, the cotangents of the results, and the dtype. It returns
the results and the gradients. Like the function that it checks, it computes gradients from the
saved array, which is the rounded output. The arrays are `Bounded`: float64 values with bounds on
the rounding errors of a computation in float32. (`probabilities`, `softmax_gradient` and `Norm`
also take NumPy arrays.) The normalised axis is the last one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxnorm.tools import running_error
from jaxnorm.tools.running_error import Axes, Bounded, exp, kept, largest, mean, rsqrt, total

Arrays = dict[str, Any]
#: The results of a call, and a dict that maps names of operands to their gradients.
Results = tuple[list[Bounded], dict[str, Bounded]]


def softmax(
    given: Arrays,
    cotangents: list[Bounded],
    dtype: str,
    *,
    log: bool = False,
    scale: float = 1.0,
    causal: bool = False,
) -> Results:
    """Return the softmax of ``z = scale * x + bias``, or its logarithm, and the gradients.

    `given` has the operands x, bias and where. If `log` is True, the result is the logarithm.
    """
    x, (d,) = given["x"], cotangents
    mask = np.broadcast_to(given.get("where", True), x.shape)
    if causal:
        mask = mask & np.tri(*x.shape[-2:]).astype(bool)
    z = x * scale if scale != 1 else x
    if "bias" in given:
        z = z + given["bias"]
    y = probabilities(z, mask, log=log).stored(dtype).kept(mask)
    dz = softmax_gradient(y, d.kept(mask), log=log).kept(mask)
    gradients = {"x": (dz * scale if scale != 1 else dz).stored(dtype)}
    if "bias" in given:
        shape = (1,) * (len(dz.shape) - len(given["bias"].shape)) + given["bias"].shape
        axes = [i for i, size in enumerate(shape) if size == 1 < dz.shape[i]]
        gradients["bias"] = dz.sum(axes).stored(dtype)
    return [y.kept(mask, -math.inf if log else 0)], gradients


def probabilities(z: Any, mask: np.ndarray, axes: Axes = -1, *, log: bool = False) -> Any:
    """Return the softmax, or its logarithm, over the entries where the mask is True.

    The result at the other entries is 0, or -inf for the logarithm.
    """
    shifted = z - largest(z, mask, axes)
    exponentials = kept(exp(shifted), mask)
    sums = total(exponentials, axes)
    y = shifted - running_error.log(sums) if log else exponentials / sums
    return kept(y, mask, -math.inf if log else 0)


def softmax_gradient(y: Any, d: Any, axes: Axes = -1, *, log: bool = False) -> Any:
    """Return the gradient with respect to the logits.

    `y` is the softmax or, if `log` is True, its logarithm. `d` is the cotangent of y.
    """
    return d - exp(y) * total(d, axes) if log else y * (d - total(d * y, axes))


def log_softmax(given: Arrays, cotangents: list[Bounded], dtype: str, **options: Any) -> Results:
    """Return ``log_softmax`` and its gradients; `options` are the options of `softmax`."""
    return softmax(given, cotangents, dtype, log=True, **options)


class Norm:
    """LayerNorm or RMSNorm of x, ``y = x_hat * scale + bias``, and its gradients.

    Attributes:
      mean: the mean of each row; 0 for RMSNorm.
      r: the reciprocal of each row's standard deviation or, for RMSNorm, root mean square.
      x_hat: the normalised x.
      y: the result, without rounding.
    """

    def __init__(
        self,
        x: Any,
        scale: Any,
        bias: Any = None,
        *,
        subtract_mean: bool | None = None,
        epsilon: float = 1e-6,
    ) -> None:
        """Compute the forward pass of a LayerNorm or an RMSNorm.

        It is a LayerNorm if `subtract_mean` is True, and an RMSNorm if it is False. If
        `subtract_mean` is None, it is a LayerNorm if there is a bias, and otherwise an RMSNorm.
        """
        self.scale, self.bias = scale, bias
        self.subtract_mean = bias is not None if subtract_mean is None else subtract_mean
        self.mean = mean(x) if self.subtract_mean else 0.0
        centred = x - self.mean if self.subtract_mean else x
        self.r = rsqrt(mean(centred * centred) + epsilon)
        self.x_hat = centred * self.r
        self.y = self.x_hat * scale
        if bias is not None:
            self.y = self.y + bias

    def means(self, dg: Any, x_hat: Any) -> tuple[Any, Any]:
        """Return the two row means in the formula of dx: ``mean(dg)`` and ``mean(dg * x_hat)``.

        Here, ``dg = dy * scale``. The first mean is 0 for RMSNorm.
        """
        return mean(dg) if self.subtract_mean else 0.0, mean(dg * x_hat)

    def backward(self, dy: Any, saved: Any = None) -> dict[str, Any]:
        """Return the gradients, computed from `saved` (the rounded y) or, if it is None, from x."""
        x_hat = self.x_hat
        if saved is not None:
            x_hat = (saved - self.bias if self.bias is not None else saved) / self.scale
        dg = dy * self.scale
        c1, c2 = self.means(dg, x_hat)
        dx = dg - x_hat * c2
        if self.subtract_mean:
            dx = dx - c1
        rows = tuple(range(len(dy.shape) - 1))
        gradients = {"x": dx * self.r, "scale": total(dy * x_hat, rows)}
        return gradients | ({} if self.bias is None else {"bias": total(dy, rows)})


def norm(given: Arrays, d: list[Bounded], dtype: str, *, activation: str | None = None) -> Results:
    """Return a norm, or the silu of a norm, and the gradients."""
    of = Norm(given["x"], given["scale"], given.get("bias"))
    if activation is not None:
        a, slope = _silu(of.y)
        return [a.stored(dtype)], _stored(of.backward(d[0] * slope), dtype)
    y = of.y.stored(dtype)
    return [y], _stored(of.backward(d[0], y), dtype)


def add_norm(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``y = norm(h)`` and ``h = x + residual``, and the gradients.

    y is the norm of the rounded h.
    """
    h = (given["x"] + given["residual"]).stored(dtype)
    of = Norm(h, given["scale"], given.get("bias"))
    y = of.y.stored(dtype)
    gradients = of.backward(d[0], y)
    gradients["x"] = gradients["residual"] = gradients["x"] + d[1]
    return [y, h], _stored(gradients, dtype)


def scaled_add_norm(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``y = norm(h)`` and ``h = residual + gate * x``, and the gradients.

    y is the norm of the rounded h.
    """
    x, gate = given["x"], given["gate"]
    h = (x * gate + given["residual"]).stored(dtype)
    of = Norm(h, given["scale"], given.get("bias"))
    y = of.y.stored(dtype)
    gradients = of.backward(d[0], y)
    dh = gradients["x"] + d[1]
    of_gate = (dh * x).sum(tuple(range(dh.value.ndim - 1)))
    gradients |= {"x": dh * gate, "residual": dh, "gate": of_gate}
    return [y, h], _stored(gradients, dtype)


def norm_add(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``y = residual + norm(x)`` and the gradients. norm(x) is not rounded."""
    of = Norm(given["x"], given["scale"], None)
    gradients = of.backward(d[0])
    return [(given["residual"] + of.y).stored(dtype)], _stored(
        gradients | {"residual": d[0]}, dtype
    )


def norm_add_norm(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``y = norm(h)`` and ``h = residual + norm(x)``, and the gradients.

    y is the norm of the rounded h.
    """
    first = Norm(given["x"], given["scale"], None)
    h = (given["residual"] + first.y).stored(dtype)
    last = Norm(h, given["next_scale"], None)
    y = last.y.stored(dtype)
    of_last = last.backward(d[0], y)
    dh = (of_last["x"] + d[1]).stored(dtype)
    gradients = first.backward(dh)
    gradients |= {"residual": dh, "next_scale": of_last["scale"]}
    return [y, h], _stored(gradients, dtype)


class Rotation:
    """The rotation of pairs of columns: ``v * cos + partner(v) * sin``.

    partner(v) swaps the two columns of each pair. In the first column of a pair, `sin` has the
    opposite sign of the table that the user passes.
    """

    def __init__(self, cos: Any, sin: Any, cols: int, *, interleaved: bool):
        pairs = cos.shape[-1]
        columns = np.arange(2 * pairs).reshape((pairs, 2) if interleaved else (2, pairs))
        first, second = columns.T if interleaved else columns
        self.partner = np.arange(cols)
        self.partner[first], self.partner[second] = second, first

        def along(table: Any, of_first: float, of_others: float) -> Any:
            """Expand a table, which has one value per pair of columns, to one value per column.

            In the first column of each pair, the value is multiplied by `of_first`. The value of
            columns that are not rotated is `of_others`.
            """
            if isinstance(table, Bounded):
                return Bounded(along(table.value, of_first, of_others), along(table.error, 1, 0))
            spread = np.full((*table.shape[:-1], cols), float(of_others))
            spread[..., first], spread[..., second] = of_first * table, table
            return spread

        self.first, self.second = first, second
        self.cos, self.sin = along(cos, 1, 1), along(sin, -1, 0)

    def __call__(self, v: Any) -> Any:
        return v * self.cos + v[..., self.partner] * self.sin

    def transposed(self, v: Any) -> Any:
        return v * self.cos - v[..., self.partner] * self.sin

    def undone(self, v: Any) -> Any:
        return self.transposed(v) / (self.cos * self.cos + self.sin * self.sin)


def norm_rope(given: Arrays, d: list[Bounded], dtype: str, *, interleaved: bool = False) -> Results:
    """Return ``y = rotation(norm(x), cos, sin)`` and the gradients. norm(x) is not rounded."""
    cols = given["x"].value.shape[-1]
    rotation = Rotation(given["cos"], given["sin"], cols, interleaved=interleaved)
    of = Norm(given["x"], given["scale"], None)
    y = rotation(of.y).stored(dtype)
    return [y], _stored(of.backward(rotation.transposed(d[0]), rotation.undone(y)), dtype)


def norm_gated(
    given: Arrays, d: list[Bounded], dtype: str, *, norm_before_gate: bool = True
) -> Results:
    """Return ``norm(x) * silu(gate)`` or ``norm(x * silu(gate))``, and the gradients.

    The gradients are computed from x and gate, not from y.
    """
    x, gate, scale = given["x"], given["gate"], given["scale"]
    a, slope = _silu(gate)
    of = Norm(x if norm_before_gate else x * a, scale, None)
    if norm_before_gate:
        gradients = of.backward(d[0] * a)
        gradients["gate"] = d[0] * of.y * slope
        return [(of.y * a).stored(dtype)], _stored(gradients, dtype)
    gradients = of.backward(d[0])
    dt = gradients["x"]
    gradients |= {"x": dt * a, "gate": dt * x * slope}
    return [of.y.stored(dtype)], _stored(gradients, dtype)


def _silu(v: Bounded) -> tuple[Bounded, Bounded]:
    """Return the silu of v, and the derivative of silu at v."""
    sigmoid = Bounded.exact(np.ones_like(v.value)) / ((-v).exp() + 1)
    return v * sigmoid, sigmoid * (v * (1 - sigmoid) + 1)


def norm_linear(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``rms_norm(x) @ weight + bias`` and the gradients.

    The norm is rounded before the matmul. The gradients are computed from x.
    """
    of = Norm(given["x"], given["scale"], None)
    n, weight = of.y.stored(dtype), given["weight"]
    gradients = of.backward((d[0] @ weight.transposed).stored(dtype))
    gradients |= {"weight": n.transposed @ d[0], "bias": d[0].sum(0)}
    return [(n @ weight + given["bias"]).stored(dtype)], _stored(gradients, dtype)


def gated_linear(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``h @ weight`` with ``h = silu(gate) * up``, and the gradients.

    h and its gradient are rounded to `dtype`.
    """
    gate, up, weight = given["gate"], given["up"], given["weight"]
    a, slope = _silu(gate)
    h, dh = (a * up).stored(dtype), (d[0] @ weight.transposed).stored(dtype)
    gradients = {"gate": dh * up * slope, "up": dh * a, "weight": h.transposed @ d[0]}
    return [(h @ weight).stored(dtype)], _stored(gradients, dtype)


def activation_linear(given: Arrays, d: list[Bounded], dtype: str, *, activation: str) -> Results:
    """Return ``h @ weight`` with ``h = silu(x)``, and the gradients.

    h and its gradient are rounded to `dtype`.
    """
    assert activation == "silu"
    a, slope = _silu(given["x"])
    h, dh = a.stored(dtype), (d[0] @ given["weight"].transposed).stored(dtype)
    gradients = {"x": dh * slope, "weight": h.transposed @ d[0]}
    return [(h @ given["weight"]).stored(dtype)], _stored(gradients, dtype)


def cross_entropy(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return the loss ``log(sum(exp(x))) - x[label]`` of each row, and the gradients."""
    loss, slope = _losses(given["logits"], given["labels"])
    of_rows = d[0].reshape(loss.value.shape)
    return [loss], {"logits": (of_rows * slope).stored(dtype)}


def log_prob_and_entropy(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return ``log(p[label])`` and ``-sum(p * log(p))`` of each row, and the gradients."""
    results, gradient = _log_probs(given["logits"], given["labels"], d)
    return results, {"logits": gradient.stored(dtype)}


def kl_divergence(given: Arrays, d: list[Bounded], dtype: str, *, reverse: bool = False) -> Results:
    """Return ``sum(p * log(p / q))`` of each row, and the gradients.

    p is the teacher's softmax, and q the student's; `reverse` swaps them.
    """
    x, teacher = given["logits"], given["teacher_logits"]
    divergence, slope = _divergence(x, teacher, reverse=reverse)
    of_rows = d[0].reshape(divergence.value.shape)
    none = Bounded.exact(np.zeros_like(teacher.value))
    return [divergence], {"logits": (of_rows * slope).stored(dtype), "teacher_logits": none}


def _divergence(x: Bounded, teacher: Bounded, *, reverse: bool) -> tuple[Bounded, Bounded]:
    """Return the rows' divergences, an array (..., 1), and their gradients with respect to x."""
    log_q, log_p = (_log_softmax(logits) for logits in (x, teacher))
    if not reverse:
        return (log_p.exp() * (log_p - log_q)).sum(), log_q.exp() - log_p.exp()
    q, ratio = log_q.exp(), log_q - log_p
    divergence = (q * ratio).sum()
    return divergence, q * (ratio - divergence)


def _log_softmax(x: Bounded) -> Bounded:
    shifted = x - x.at(x.value.argmax(-1))
    return shifted - shifted.exp().sum().log()


def linear_cross_entropy(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return the mean cross-entropy of the logits ``x @ weight + bias``, and the gradients.

    The logits, and the operands of all matmuls, are rounded to `dtype`.
    """
    x, weight = given["x"], given["weight"]
    logits = ((x @ weight).stored(dtype) + given["bias"]).stored(dtype)
    loss, slope = _losses(logits, given["labels"])
    return [loss.mean(0)], _of_mean(slope, x, weight, d[0], dtype)


def _of_mean(slope: Bounded, x: Bounded, weight: Bounded, d: Bounded, dtype: str) -> Arrays:
    """Return the gradients of the mean of the rows' results, which are functions of the logits.

    Args:
      slope: the gradient of each row's result with respect to its logits ``x @ weight + bias``.
      d: the cotangent of the mean.
    """
    slope, share = slope.stored(dtype), d * (1 / len(x.value))
    gradients = {
        "x": slope @ weight.transposed * share,
        "weight": x.transposed @ slope * share,
        "bias": slope.sum(0) * share,
    }
    # The forward pass saves the gradients in `dtype`. The backward pass multiplies them by the
    # cotangent of the mean, and rounds again.
    return _stored(_stored(gradients, dtype), dtype)


def log_probs_and_entropy(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return the log-probabilities of each row's k labels, the entropy, and the gradients.

    The last axis of labels has the labels of a row.
    """
    x, labels = given["logits"], given["labels"]
    each = [
        _log_probs(x, labels[..., i], [d[0][..., i], d[1] * (i == 0)])
        for i in range(labels.shape[-1])
    ]
    (_, gradient), *others = each
    for _, of_one in others:
        gradient = gradient + of_one
    values, errors = (
        np.concatenate([getattr(results[0], part) for results, _ in each], -1)
        for part in ("value", "error")
    )
    log_probs = dataclasses.replace(each[0][0][0], value=values, error=errors)
    return [log_probs, each[0][0][1]], {"logits": gradient.stored(dtype)}


def linear_kl_divergence(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return the mean divergence between two linear layers' logits, and the gradients.

    The logits are not rounded.
    """
    x, weight = given["x"], given["weight"]
    logits, teacher = x @ weight + given["bias"], given["teacher_x"] @ given["teacher_weight"]
    divergence, slope = _divergence(logits, teacher, reverse=False)
    gradients = _of_mean(slope, x, weight, d[0], dtype)
    none = {name: np.zeros_like(given[name].value) for name in ("teacher_x", "teacher_weight")}
    return [divergence.mean(0)], gradients | {n: Bounded.exact(a) for n, a in none.items()}


def linear_log_prob_and_entropy(given: Arrays, d: list[Bounded], dtype: str) -> Results:
    """Return log-probabilities and entropies of the logits ``x @ weight + bias``, and gradients.

    The logits are not rounded.
    """
    x, weight = given["x"], given["weight"]
    results, dlogits = _log_probs(x @ weight + given["bias"], given["labels"], d)
    of_products = dlogits.stored(dtype)
    gradients = {
        "x": of_products @ weight.transposed,
        "weight": x.transposed @ of_products,
        "bias": of_products.sum(0),
    }
    return results, _stored(gradients, dtype)


def _log_probs(
    x: Bounded, labels: np.ndarray, cotangents: list[Bounded]
) -> tuple[list[Bounded], Bounded]:
    """Return the rows' log-probabilities and entropies, arrays (..., 1), and x's gradient."""
    loss, slope = _losses(x, labels)
    shifted = x - x.at(x.value.argmax(-1))
    exponentials = shifted.exp()
    total = exponentials.sum()
    log_s = total.log()
    entropy = log_s - (exponentials * shifted).sum() / total
    log_p = shifted - log_s
    of_y, of_entropy = (d.reshape(loss.value.shape) for d in cotangents)
    dx = -(of_y * slope) - of_entropy * (log_p.exp() * (log_p + entropy))
    return [-loss, entropy], dx


def _losses(x: Bounded, labels: np.ndarray) -> tuple[Bounded, Bounded]:
    """Return the rows' cross-entropies, an array (..., 1), and the gradients with respect to x."""
    largest = x.at(x.value.argmax(-1))
    lse = (x - largest).exp().sum().log() + largest
    one_hot = np.arange(x.value.shape[-1]) == labels[..., None]
    return lse - x.at(labels), (x - lse).exp() - one_hot


def _stored(gradients: dict[str, Bounded], dtype: str) -> dict[str, Bounded]:
    return {name: gradient.stored(dtype) for name, gradient in gradients.items()}


# ---------------------------------------------------------------------------------------- operands


def operands(
    shapes: Mapping[str, tuple[int, ...]], classes: int, seed: int
) -> dict[str, np.ndarray]:
    """Return a dict that maps names to random operands, given the operands' shapes.

    All numbers are exact in bfloat16, and so in all dtypes that are checked. Scales are at least
    0.5: near 0, gradients from the saved output are not accurate (see
    :func:`jaxnorm.check_params`). `classes` is the number of classes of labels.
    """
    random = np.random.default_rng(seed)
    makers: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
        "where": lambda shape: random.random(shape) < 0.8,
        "labels": lambda shape: random.integers(0, classes, shape).astype(np.int32),
        "scale": lambda shape: random.uniform(0.5, 2, shape),
        "next_scale": lambda shape: random.uniform(0.5, 2, shape),
        # If cos and sin were both 0, the rotation would have no inverse. So cos is at least 0.5.
        # cos^2 + sin^2 is not 1 in general. This is a valid input, because YaRN scales its tables.
        "cos": lambda shape: random.uniform(0.5, 1, shape),
        "sin": lambda shape: random.uniform(-1, 1, shape),
        "weight": lambda shape: random.normal(size=shape) / math.sqrt(shape[0]),
    }

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = makers.get(name, lambda shape: random.normal(size=shape))(shape)
        return array if array.dtype != np.float64 else _of_bfloat16(array)

    return {name: make(name, shape) for name, shape in shapes.items()}


def _of_bfloat16(array: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)
