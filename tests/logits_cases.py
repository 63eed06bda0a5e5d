"""Cases and calls for tests of softmaxes with a mask, a bias or `causal`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from specs import BF16, F16, F32

from jaxnorm.calls.call import Call
from jaxnorm.operations.softmax import _softmax_of
from jaxnorm.tools.plan import calls_in
from jaxnorm_kernels.specs import SoftmaxOptions

SCALE = 0.37


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of a softmax: the shapes of x, the mask and the bias, and the options.

    The mask and the bias broadcast to x.
    """

    shape: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    causal: bool = False
    scale: float = SCALE
    masked_logit: float = -math.inf

    def __str__(self) -> str:
        given = {"mask": self.mask, "bias": self.bias, "causal": self.causal}
        return "-".join([str(self.shape), *(f"{k} {v}" for k, v in given.items() if v)])

    def call(self, op: str, x: Any, bias: Any = None, y: Any = None) -> Call:
        """Return the forward call of `op`.

        `x`, `bias` and `y` are dtypes. `bias` and `y` default to the dtype of x.
        """

        def struct(shape: tuple[int, ...] | None, dtype: Any) -> jax.ShapeDtypeStruct | None:
            return None if shape is None else jax.ShapeDtypeStruct(shape, dtype)

        def softmax(x: Any, mask: Any, bias: Any) -> jax.Array:
            options = SoftmaxOptions(causal=self.causal, masked_logit=self.masked_logit)
            arguments = -1, mask, self.scale, bias, y or x.dtype, None
            return _softmax_of(op, options, x, *arguments)

        arrays = struct(self.shape, x), struct(self.mask, bool), struct(self.bias, bias or x)
        return next(calls_in(jax.make_jaxpr(softmax)(*arrays).jaxpr))

    def backward(self, op: str, x: Any, bias: Any = None, y: Any = None) -> Call:
        call = self.call(op, x, bias, y)
        return call.backward(call.differentiable)


#: All ways in which attention broadcasts masks and biases over the rows. S is the sequence length.
S = 2048
KINDS = {
    "mask": Case((4, 16, S, S), mask=(4, 1, S, S)),
    "bias": Case((4, 16, S, S), bias=(16, S, S)),
    "keys": Case((4, 16, S, S), bias=(4, 1, 1, S), mask=(4, 1, 1, S)),
    "rows": Case((4, 16, S, S), bias=(4, 16, S, 1), mask=(S, 1)),
    "causal": Case((4, 16, S, S), causal=True),
    "all": Case((4, 16, S, S), mask=(4, 16, S, S), bias=(4, 1, S, S), causal=True),
}


def of_width(kind: str, rows: int, cols: int) -> Case:
    """Return `KINDS[kind]` with `rows` queries and `cols` keys in place of the size S."""

    def sized(shape):
        if shape is None:
            return None
        *lead, keys = (rows if n == S else n for n in shape)
        return (*lead, cols if keys == rows else keys)

    case = KINDS[kind]
    return dataclasses.replace(
        case, shape=sized(case.shape), mask=sized(case.mask), bias=sized(case.bias)
    )


#: Widths (numbers of columns). Each kind of schedule is chosen for at least one of them.
COLS = [64, 100, 256, 1000, 1024, 2048, 3000, 4096, 8192, 16384]


def mixed():
    """Yield combinations of a width, a kind of case and dtypes.

    The first width is combined with the kinds at even indices, the next width with the kinds at odd
    indices, and so on. The combinations of dtypes change from case to case.
    """
    for i, cols in enumerate(COLS):
        for j, kind in enumerate(KINDS):
            if (i + j) % 2:
                continue
            mix = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, F16)][(i + j) % 3]
            yield pytest.param(kind, cols, mix, id=f"{kind}-{cols}-{mix[0]}-{mix[1]}-{mix[2]}")


def op_of(kind: str, cols: int) -> str:
    """Return "softmax" or "log_softmax".

    They alternate, so that the cases of each width and of each kind contain both.
    """
    return ["softmax", "log_softmax"][(COLS.index(cols) + list(KINDS).index(kind)) % 2]


def operand_types(call: Call) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the operands of a forward or a backward call."""
    spec, view = call.spec, call.view
    is_forward = spec.direction == "fwd"
    x = jax.ShapeDtypeStruct(view.shape, spec.x_dtype if is_forward else spec.y_dtype)
    mask = [jax.ShapeDtypeStruct(view.mask, jnp.bool_)] * spec.logits.has_mask
    if not is_forward:
        return [x, *mask, x]
    if spec.softmax.logits_bias_dtype is None:
        return [x, *mask]
    return [x, *mask, jax.ShapeDtypeStruct(view.logits_bias, spec.softmax.logits_bias_dtype)]


def assert_like_xla(implementation, case, op, dtypes):
    """Assert that the results of forward and backward agree with XLA's.

    The bound covers two roundings, and sums that are added in another order.
    """
    forward, backward = case.call(op, *dtypes), case.backward(op, *dtypes)
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(a, deviation):
        return (deviation * jax.random.normal(next(keys), a.shape)).astype(a.dtype)

    x, *rest = operand_types(forward)
    operands = [normal(x, 3)]
    operands += [
        jax.random.bernoulli(next(keys), 0.7, a.shape) if a.dtype == bool else normal(a, 2)
        for a in rest
    ]
    (y,) = assert_near(implementation, forward, *operands)
    masks = [a for a in operands if a.dtype == bool]
    assert_near(implementation, backward, y, *masks, normal(y, 1))


def assert_near(implementation, call, *operands):
    expected = jax.jit(call.xla)(*operands)
    got = jax.jit(call.kernel(implementation))(*operands)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        of = jnp.finfo(theirs.dtype)
        terms = call.view.cols + theirs.size // call.view.cols
        bound = max(4 * float(of.eps), 8 * math.sqrt(terms) * 2.0**-24)
        # A bias with one column is broadcast over the rows of the logits, so its gradient is a sum
        # over each row. The terms of this sum may cancel. The error is therefore compared with the
        # size of the terms (about 1 per term for log_softmax), and not with the sum.
        least = math.sqrt(call.view.cols) if theirs.shape[-1] == 1 else 0.0
        error, alike = difference(ours, theirs, least)
        assert alike
        assert error <= bound, (error, bound)
    return expected


@jax.jit
def difference(ours, theirs, least):
    """Return the largest difference, and True if the non-finite elements are equal.

    The difference is divided by the largest element of `theirs`, or by `least` if that is larger.
    """
    finite = jnp.isfinite(theirs)
    alike = jnp.all(finite | (ours == theirs))
    ours, theirs = (jnp.where(finite, a, 0).astype(jnp.float32) for a in (ours, theirs))
    largest = jnp.maximum(jnp.max(jnp.abs(theirs)), least)
    return jnp.max(jnp.abs(ours - theirs)) / largest, alike
