"""Values of a loss, which are compared with those of jaxnorm's losses of a linear layer."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxnorm.tools.kept_arrays import Value
from jaxnorm.tools.values import Draw, Head, Rows, UnknownError, agree, sums_classes

# Scales that differ less from 1 differ because numbers in the program are rounded to float32.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)


class Loss:
    """The values of a loss for random logits, which are compared with those of jaxnorm's losses.

    Attributes:
      heads: the linear layer of the logits and, if there are two, the teacher's linear layer.
      rows: the arrays that are computed from the logits position by position.
      draws: values of these arrays, for several logits, labels and weights. The last draw has the
        values of the first one after each `stop_gradient`, although its logits are others. A loss
        that has the right values, but other gradients, has other values there.
      logits, results: the values of arrays with a number for each class, and for each position.
    """

    def __init__(self, heads: Sequence[Head], rows: Rows) -> None:
        self.heads, self.rows, self.draws = heads, rows, list[Draw]()
        self.logits, self.results = dict[Value, np.ndarray](), dict[Value, np.ndarray]()
        for seed in range(3):
            random = np.random.default_rng(seed)
            given = {head.logits: self._given(head, random) for head in heads}
            self.draws.append(Draw(rows, given, {}, seed))
        first, logits = self.draws[0], heads[0].logits
        kept = {v for v in rows if v.made_by == "stop_gradient"} | {h.logits for h in heads}
        with contextlib.suppress(UnknownError):
            given = {v: first(v) for v in kept} | {logits: given[logits]}
            self.draws.append(Draw(rows, given, first.drawn))
        for value in rows:
            with contextlib.suppress(UnknownError):
                found = np.stack([draw(value).ravel() for draw in self.draws])
                if found.dtype.kind == "f" and found.shape[1] == heads[0].classes:
                    self.logits[value] = found
                if found.shape[1] == 1 or any(sums_classes(u, rows[value]) for u in value.users):
                    self.results[value] = found.sum(1)

    def _given(self, head: Head, random: np.random.Generator) -> np.ndarray:
        shape = [n if i == head.axis else 1 for i, n in enumerate(head.logits.shape)]
        return 3 * random.normal(size=shape)

    def found(self) -> Iterator[tuple[str, list[Value], dict[str, str]]]:
        """Yield triples: a loss of jaxnorm, the arrays that it computes, and its options."""
        for value, z in self.logits.items():
            log_p = _log_softmax(z)
            entropies = self._equal(np.sum(np.exp(log_p) * log_p, -1))
            for label in self._labels():
                log_probs = self._equal(log_p[np.arange(len(log_p)), label])
                options = self._options(value, self.heads[0]) if log_probs else None
                if options is None:
                    continue
                for v in log_probs:
                    if v.size // self.rows[v].size in (1, self.heads[0].classes):
                        yield "linear_softmax_cross_entropy", [v], options
                for v, entropy in itertools.product(log_probs, [[], *([e] for e in entropies)]):
                    yield "linear_log_prob_and_entropy", [v, *entropy], options
            for teacher, other in self.logits.items() if len(self.heads) == 2 else ():
                yield from self._divergences(value, log_p, teacher, _log_softmax(other))

    def _divergences(
        self, value: Value, log_q: np.ndarray, teacher: Value, log_p: np.ndarray
    ) -> Iterator[tuple[str, list[Value], dict[str, str]]]:
        for reverse, p, q in (("False", log_p, log_q), ("True", log_q, log_p)):
            found = self._equal(np.sum(np.exp(p) * (p - q), -1))
            pairs = zip((value, teacher), self.heads)
            options, others = (self._options(*pair) if found else None for pair in pairs)
            if options is None or others is None:
                continue
            if options.get("logits_scale") == others.pop("logits_scale", None):
                options |= {f"teacher_{name}": text for name, text in others.items()}
                options |= {"reverse": reverse} if reverse == "True" else {}
                yield from (("linear_kl_divergence", [v], options) for v in found)

    def _equal(self, numbers: np.ndarray) -> list[Value]:
        """Return the arrays that have these numbers, or the numbers with the other sign."""
        found = self.results.items()
        return [v for v, r in found if agree(r, numbers) or agree(r, -numbers)]

    def _labels(self) -> set[tuple[int, ...]]:
        """Return the values of the integers that may be labels: an index for each draw."""
        arrays = [draw.arrays for draw in self.draws]
        common = [v for v in arrays[0] if v not in self.rows and all(v in a for a in arrays)]
        found = (np.stack([a[v].ravel() for a in arrays]) for v in common if _is_integer(v))
        return {tuple(a[:, 0] % self.heads[0].classes) for a in found if a.shape[1] == 1}

    def _options(self, value: Value, head: Head) -> dict[str, str] | None:
        """Return the options with which a loss computes `value` from the logits of a head.

        It computes ``cap * tanh(scale * (logits + bias) / cap)``, or the same without a cap. Return
        None if `value` is computed in another way.
        """
        scales, options = [], dict[str, str]()
        for draw in self.draws:
            z, given = draw(head.logits), {h.logits: draw(h.logits) for h in self.heads}
            ends = Draw(self.rows, given | {head.logits: 1e30 * z}, draw.drawn)(value)
            zero = Draw(self.rows, given | {head.logits: 0 * z}, draw.drawn)(value).ravel()
            z, y, cap = z.ravel(), draw(value).ravel(), float(np.max(np.abs(ends)))
            if cap < 1e20:
                options["logit_softcap"] = f"{cap:.7g}"
                y, zero = (cap * np.arctanh(a / cap) for a in (y, zero))
            scales.append(np.dot(z, y - zero) / np.dot(z, z))
            bias = zero / (scales[-1] or 1.0)
            if np.any(bias):
                options["bias"] = "the added vector"
            others = [a.ravel() for v, a in draw.arrays.items() if v not in self.rows]
            vectors = [0 * z, *(a for a in others if a.size == z.size)]
            is_linear = scales[-1] and agree(scales[-1] * z, y - zero)
            if not (is_linear and any(agree(bias, vector) for vector in vectors)):
                return None
        if np.ptp(scales) > _ROUNDING * abs(scales[0]):
            inputs = self.draws[0].drawn.items()
            if any(v.is_active and a.size == 1 for v, a in inputs):  # a scale has no gradient
                return None
            options["logits_scale"] = "the scale"
        elif abs(scales[0] - 1) > _ROUNDING:
            options["logits_scale"] = f"{scales[0]:.7g}"
        return options


def _is_integer(value: Value) -> bool:
    return np.issubdtype(value.dtype, np.integer)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - np.max(z, -1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), -1, keepdims=True))
