"""Recognise a loss: compare its values for random logits with those of jaxnorm's linear losses."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from jaxnorm.tools.kept_arrays import Value
from jaxnorm.tools.values import Draw, Head, Rows, UnknownError, agree, stored, sums_classes

# Smaller relative differences are attributed to the rounding of literals to float32.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)

# Standard deviation of the logits in each draw. Large logits reveal if a loss clips its logits.
_DEVIATIONS = np.array([3.0, 60.0, 3.0, 3.0])


class Loss:
    """The values of a loss for random logits, to be compared with the values of jaxnorm's losses.

    Attributes:
      heads: the linear layer of the logits and, if there are two, the teacher's linear layer.
      rows: a dict whose keys are the arrays that are computed from the logits position by position;
        see `values.positions`.
      draws: values of these arrays, for several random logits, labels and weights. The last draw
        has other logits than the first one, but the same values after each `stop_gradient`. So a
        loss with the right values, but other gradients, differs in this draw.
      logits: a dict that maps the arrays with a number for each class to their values in each draw.
      results: a dict that maps the arrays with one number for the position to their values in each
        draw. Arrays that the program sums over classes are included, with their sums.
    """

    def __init__(self, heads: Sequence[Head], rows: Rows) -> None:
        self.heads, self.rows = heads, rows
        self.logits, self.results = dict[Value, np.ndarray](), dict[Value, np.ndarray]()
        randoms = [(d, np.random.default_rng(seed)) for seed, d in enumerate(_DEVIATIONS)]
        given = [{h.logits: d * r.normal(size=h.row()) for h in heads} for d, r in randoms]
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
        """Yield each jaxnorm loss that the program computes, as (name, arrays, entropies, options).

        ``arrays`` are the program's arrays that are equal to the loss, up to the sign.
        ``entropies`` are its arrays that are equal to the entropies, up to the sign. ``options``
        maps names of the loss's arguments to their source text.
        """
        for z, numbers in self.logits.items():
            log_p = special.log_softmax(numbers, -1)
            entropies = self._equal(np.sum(np.exp(log_p) * log_p, -1))
            for label in self._labels():
                picked = self._equal(log_p[np.arange(len(log_p)), label])
                known = self._options(z, self.heads[0]) if picked else None
                if known is not None:
                    yield "linear_log_prob_and_entropy", picked, entropies, known[0]
            for teacher, others in self.logits.items() if len(self.heads) == 2 else ():
                of_teacher = special.log_softmax(others, -1)
                pairs = (of_teacher, log_p), (log_p, of_teacher)
                for reverse, (p, q) in zip(({}, {"reverse": "True"}), pairs):
                    found = self._equal(np.sum(np.exp(p) * (p - q), -1))
                    options = self._options_of_both(z, teacher) if found else None
                    if options is not None:
                        yield "linear_kl_divergence", found, set(), options | reverse

    def _equal(self, numbers: np.ndarray) -> set[Value]:
        """Return the arrays that are equal to these numbers in all draws, up to the sign."""
        units = _DEVIATIONS[: len(self.draws)]
        found = [(v, r / units) for v, r in self.results.items()]
        return {v for v, r in found if agree(r, numbers / units) or agree(r, -numbers / units)}

    def _labels(self) -> set[tuple[int, ...]]:
        """Return the candidates for the label: for each integer array, its value in each draw."""
        known = [draw.arrays for draw in self.draws]
        common = [v for v in known[0] if np.issubdtype(v.dtype, np.integer)]
        common = [v for v in common if v not in self.rows and all(v in each for each in known)]
        found = [np.stack([draw.row(v) for draw in self.draws]) for v in common]
        return {tuple(a[:, 0] % self.heads[0].classes) for a in found if a.shape[1] == 1}

    def _options_of_both(self, student: Value, teacher: Value) -> dict[str, str] | None:
        of_student, of_teacher = map(self._options, (student, teacher), self.heads)
        if of_student is None or of_teacher is None:
            return None
        (options, scales), (others, other_scales) = of_student, of_teacher
        others.pop("logits_scale", None)
        named = {f"teacher_{name}": text for name, text in others.items()}
        return options | named if agree(scales, other_scales) else None

    def _options(self, value: Value, head: Head) -> tuple[dict[str, str], np.ndarray] | None:
        """Return the options with which a loss computes `value` from the logits of a head.

        The loss first computes ``cap * tanh(scale * (logits + bias) / cap)`` or, without a cap,
        ``scale * (logits + bias)``. The result is a pair: the options, as a dict, and an array with
        the scale in each draw. The result is None if `value` has another form.
        """
        scales, caps, options = [], [], dict[str, str]()
        for draw in self.draws:
            z, logits, small = draw.row(head.logits), stored(draw(head.logits)), 1e-3
            multiples = (draw.given | {head.logits: n * logits} for n in (0.0, small, 1.0, 1e30))
            zero, near, y, far = (Draw(self.rows, m, draw.drawn).row(value) for m in multiples)
            cap = np.max(np.abs(far))
            is_capped = cap < 1e20 * np.max(np.abs(y))
            if is_capped:
                zero, near = (cap * np.arctanh(a / cap) for a in (zero, near))
            scale = np.dot(z, near - zero) / (small * np.dot(z, z))
            bias = zero / (scale or 1.0)
            expected = scale * (z + bias)
            expected = cap * np.tanh(expected / cap) if is_capped else expected
            inputs = [v for v in draw.arrays if v not in self.rows and v.size == z.size]
            vectors = [0 * z, *(draw.row(v) for v in inputs)]
            if not (agree(expected, y) and any(agree(bias, each) for each in vectors)):
                return None
            if np.any(bias):
                options["bias"] = "the added vector"
            scales.append(scale)
            caps.append(cap if is_capped else 0.0)
        if np.ptp(caps) > _ROUNDING * caps[0] or 0.0 in scales:
            return None
        if any(caps):
            options["logit_softcap"] = f"{caps[0]:.7g}"
        if np.ptp(scales) > _ROUNDING * abs(scales[0]):
            drawn = self.draws[0].drawn.items()
            if any(v.is_active and a.size == 1 for v, a in drawn):  # a scale has no gradient
                return None
            options["logits_scale"] = "the scale"
        elif abs(scales[0] - 1) > _ROUNDING:
            options["logits_scale"] = f"{scales[0]:.7g}"
        return options, np.array(scales)
