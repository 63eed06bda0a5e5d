"""Values of a loss, which are compared with those of jaxnorm's losses of a linear layer."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from jaxnorm.tools.kept_arrays import Value
from jaxnorm.tools.values import Draw, Head, Rows, UnknownError, agree, stored, sums_classes

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
        self.heads, self.rows = heads, rows
        self.logits, self.results = dict[Value, np.ndarray](), dict[Value, np.ndarray]()
        randoms = map(np.random.default_rng, range(4))
        given = [{h.logits: 3 * r.normal(size=h.row()) for h in heads} for r in randoms]
        self.draws = [Draw(rows, each, {}, seed) for seed, each in enumerate(given[:3])]
        first, (student, *teacher) = self.draws[0], (h.logits for h in heads)
        with contextlib.suppress(UnknownError):
            stopped = {v: first(v) for v in [*rows, *teacher] if v.made_by == "stop_gradient"}
            same = {v: first(v) for v in teacher}
            last = stopped | same | {student: given[3][student]}
            self.draws.append(Draw(rows, last, first.drawn))
        for value in rows:
            with contextlib.suppress(UnknownError):
                found = np.stack([draw.row(value) for draw in self.draws])
                if found.dtype.kind == "f" and found.shape[1] == heads[0].classes:
                    self.logits[value] = found
                if found.shape[1] == 1 or any(sums_classes(u, rows[value]) for u in value.users):
                    self.results[value] = found.sum(1)

    def found(self) -> Iterator[tuple[str, set[Value], set[Value], dict[str, str]]]:
        """Yield losses of jaxnorm with their options, and the arrays that have their numbers.

        The arrays are in two sets: those with the loss, and those with the entropy.
        """
        for z, numbers in self.logits.items():
            log_p = special.log_softmax(numbers, -1)
            entropies = self._equal(np.sum(np.exp(log_p) * log_p, -1))
            for label in self._labels():
                picked = self._equal(log_p[np.arange(len(log_p)), label])
                options = self._options(z, self.heads[0]) if picked else None
                if options is not None:
                    yield "linear_log_prob_and_entropy", picked, entropies, options
            for teacher, others in self.logits.items() if len(self.heads) == 2 else ():
                of_teacher = special.log_softmax(others, -1)
                pairs = (of_teacher, log_p), (log_p, of_teacher)
                for reverse, (p, q) in zip(({}, {"reverse": "True"}), pairs):
                    found = self._equal(np.sum(np.exp(p) * (p - q), -1))
                    options = self._options_of_both(z, teacher) if found else None
                    if options is not None:
                        yield "linear_kl_divergence", found, set(), options | reverse

    def _equal(self, numbers: np.ndarray) -> set[Value]:
        """Return the arrays that have these numbers, or the numbers with the other sign."""
        found = self.results.items()
        return {v for v, r in found if agree(r, numbers) or agree(r, -numbers)}

    def _labels(self) -> set[tuple[int, ...]]:
        """Return the values of the integers that may be labels: an index for each draw."""
        known = [draw.arrays for draw in self.draws]
        common = [v for v in known[0] if np.issubdtype(v.dtype, np.integer)]
        common = [v for v in common if v not in self.rows and all(v in each for each in known)]
        found = [np.stack([draw.row(v) for draw in self.draws]) for v in common]
        return {tuple(a[:, 0] % self.heads[0].classes) for a in found if a.shape[1] == 1}

    def _options_of_both(self, student: Value, teacher: Value) -> dict[str, str] | None:
        options, others = map(self._options, (student, teacher), self.heads)
        if options is None or others is None:
            return None
        is_same = options.get("logits_scale") == others.pop("logits_scale", None)
        named = {f"teacher_{name}": text for name, text in others.items()}
        return options | named if is_same else None

    def _options(self, value: Value, head: Head) -> dict[str, str] | None:
        """Return the options with which a loss computes `value` from the logits of a head.

        It computes ``cap * tanh(scale * (logits + bias) / cap)``, or the same without a cap. Return
        None if `value` is computed in another way.
        """
        scales, options = [], dict[str, str]()
        for draw in self.draws:
            given = {h.logits: stored(draw(h.logits)) for h in self.heads}
            multiples = (given | {head.logits: n * given[head.logits]} for n in (0.0, 1.0, 1e30))
            zero, y, end = (Draw(self.rows, m, draw.drawn).row(value) for m in multiples)
            z = draw.row(head.logits)
            cap = float(np.max(np.abs(end)))
            if cap < 1e20 * np.max(np.abs(y)):
                options["logit_softcap"] = f"{cap:.7g}"
                zero, y = (cap * np.arctanh(a / cap) for a in (zero, y))
            scales.append(np.dot(z, y - zero) / np.dot(z, z))
            bias = zero / (scales[-1] or 1.0)
            if np.any(bias):
                options["bias"] = "the added vector"
            inputs = [v for v in draw.arrays if v not in self.rows and v.size == z.size]
            vectors = [0 * z, *(draw.row(v) for v in inputs)]
            is_linear = scales[-1] and agree(scales[-1] * z, y - zero)
            if not (is_linear and any(agree(bias, each) for each in vectors)):
                return None
        if np.ptp(scales) > _ROUNDING * abs(scales[0]):
            drawn = self.draws[0].drawn.items()
            if any(v.is_active and a.size == 1 for v, a in drawn):  # a scale has no gradient
                return None
            options["logits_scale"] = "the scale"
        elif abs(scales[0] - 1) > _ROUNDING:
            options["logits_scale"] = f"{scales[0]:.7g}"
        return options
