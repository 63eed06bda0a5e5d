"""Times of the Triton kernels, divided by XLA's times.

On Ampere, Ada and Blackwell GPUs, these ratios decide whether a kernel is the default. None of
these GPUs was available for timing. Instead, kernels were compiled and scheduled for an A100, and
timed on an H100, which can run code for an A100. `tests/test_triton_defaults.py` computes these
ratios from the committed measurements, and compares them with `TIMINGS`.
"""

import dataclasses

from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.specs import Spec

#: Where and how the kernels were timed, as part of a sentence for users.
TIMED_ON = "an H100, with kernels compiled for an A100"

#: A kernel is the default if its time is at most this multiple of the time of XLA's code.
LIMIT = 0.8


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a kernel, divided by the time of XLA's code.

    Each of the two times is the time of a forward and a backward pass together.

    Attributes:
      ratio: the median of the ratios over all shapes and dtypes that were timed.
      least, most: the smallest and the largest of these ratios.
    """

    ratio: float
    least: float
    most: float

    def __str__(self) -> str:
        """Return the ratios as text, which `implementation_for` shows as a part of its reason."""
        if self.least == self.most:
            return f"{self.ratio:.2f} of XLA's time"
        return f"{self.ratio:.2f} of XLA's time ({self.least:.2f} to {self.most:.2f})"


#: The timings of all kernels that were timed. A key is a name that `name_of` returns.
TIMINGS: dict[str, Timing] = {
    "softmax": Timing(0.7, 0.51, 0.72),
    "log_softmax": Timing(0.82, 0.65, 0.84),
    "softmax with causal": Timing(0.31, 0.31, 0.31),
    "softmax with a bias": Timing(0.55, 0.55, 0.55),
    "softmax with where": Timing(0.42, 0.42, 0.42),
    "layer_norm": Timing(0.72, 0.59, 0.96),
    "rms_norm": Timing(0.71, 0.64, 0.82),
    "add_layer_norm": Timing(0.34, 0.32, 0.39),
    "add_rms_norm": Timing(0.63, 0.52, 0.68),
    "add_layer_norm with a gate": Timing(0.32, 0.31, 0.33),
    "rms_norm_add": Timing(0.73, 0.63, 0.8),
    "rms_norm_add_rms_norm": Timing(0.53, 0.48, 0.56),
    "rms_norm_rope": Timing(0.34, 0.31, 0.54),
    "rms_norm_gated": Timing(0.73, 0.67, 1.01),
    "rms_norm_gated with norm_before_gate=False": Timing(0.59, 0.54, 0.75),
    "softmax_cross_entropy_with_integer_labels": Timing(0.64, 0.61, 0.68),
    "softmax_cross_entropy_with_integer_labels with logit_softcap": Timing(0.54, 0.53, 0.55),
    "log_prob_and_entropy": Timing(0.57, 0.55, 0.59),
    "kl_divergence": Timing(0.39, 0.34, 0.7),
    "kl_divergence with reverse": Timing(0.43, 0.37, 0.7),
}


def name_of(spec: Spec) -> str:
    """Return the key of the call `spec` in `TIMINGS`, such as "softmax" or "softmax with where".

    The key is the name of the public function. If the call uses an option that changes the time,
    such as `where`, the option is part of the key.
    """
    subtract_mean = spec.is_norm and spec.norm.subtract_mean
    functions = {name: f for name, f in FUNCTIONS.items() if f.subtract_mean == subtract_mean}
    name = next(name for name, function in functions.items() if spec.op in function.ops)
    options = {
        "causal": spec.is_causal,
        "a bias": spec.has("logits_bias"),
        "where": spec.has("mask"),
        "reverse": spec.is_loss and spec.loss.reverse,
        "logit_softcap": spec.is_loss and spec.loss.logit_softcap is not None,
        "a gate": spec.op == functions[name].gated,
        "norm_before_gate=False": spec.has("gate") and not spec.norm.norm_before_gate,
    }
    option = next((option for option, is_used in options.items() if is_used), None)
    return name if option is None else f"{name} with {option}"


def why_not_default(spec: Spec) -> str | None:
    """Return the reason why XLA runs the call `spec` by default, or None if the kernel runs it."""
    name = name_of(spec)
    timing = TIMINGS.get(name)
    if timing is None:
        return f"its kernel for {name} was not timed"
    if timing.ratio > LIMIT:
        return f"its kernel for {name} took {timing} on {TIMED_ON}, which is more than {LIMIT}"
    return None


def caveat(spec: Spec) -> str | None:
    """Return a sentence that compares the kernel's time with XLA's time.

    Return None if the kernel was not timed.
    """
    timing = TIMINGS.get(name_of(spec))
    if timing is None:
        return None
    return f"not timed on this GPU; on {TIMED_ON}, it took {timing}"
