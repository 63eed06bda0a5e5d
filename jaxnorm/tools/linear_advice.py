"""Advice to use gated_linear or activation_linear for a linear layer after an activation."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.tools import kept_arrays, values
from jaxnorm.tools.kept_arrays import STACKED, Advice, Program, Value, origin, reached

# The activations that have a name in gated_linear and activation_linear, and further ones.
_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    '"silu"': jax.nn.silu,
    '"gelu"': jax.nn.gelu,
    '"relu"': jax.nn.relu,
    '"leaky_relu"': jax.nn.leaky_relu,
    '"sigmoid"': jax.nn.sigmoid,
    "partial(jax.nn.gelu, approximate=False)": functools.partial(jax.nn.gelu, approximate=False),
    "jnp.tanh": jnp.tanh,
}

_UNNAMED = "(a function that computes the same)"

# Number of elements for which an activation is evaluated. It is no size of an array in a model.
_ELEMENTS = 61


def linear_layers(program: Program) -> Iterator[Advice]:
    """Recognise a linear layer after an activation, with or without dropout between them.

    On the left is such code, on the right its replacement.

    ::

        y = (silu(gate) * up) @ weight      jaxnorm.gated_linear: saves gate and up
        y = gelu(x) @ weight                jaxnorm.activation_linear: saves x

    Any elementwise function with a nonlinear primitive is an activation. The weight may be trained,
    frozen or a constant.
    """
    try:
        yield from filter(None, (_of_matmul(value, program) for value in program.values))
    finally:  # The cache's keys are arrays of this graph, which would otherwise stay in memory.
        _sources.cache_clear()


def _of_matmul(matmul: Value, program: Program) -> Advice | None:
    factors = kept_arrays.rows_and_weight(matmul)
    if factors is None or kept_arrays.is_called_by(matmul, "jaxnorm.operations"):
        return None
    h = origin(factors[0])
    sources, is_nonlinear, is_alone = _sources(h)
    # The mask of dropout is recomputed from the random key, and not saved. Dropout follows the
    # activation, and divides its result by a constant.
    bits = {s for s in sources if s.made_by == "random_bits"}
    arrays = [s for s in sources if s not in bits]
    if not (is_nonlinear and is_alone and len(arrays) in (1, 2) and _is_for(matmul, h, sources)):
        return None
    ends = _before_dropout(h, bits) if bits else [h]
    steps = [step for v in ends if (step := _step(v, arrays, program)) is not None]
    found = next((s for s in steps if s.activation != _UNNAMED), next(iter(steps), None))
    if found is None:
        return None
    gate, *up = found.arrays
    between = [v for v in program.by_origin if v not in (*sources, *up) and _is_between(v, sources)]
    if not {*up} <= {*arrays}:  # `up` is computed elementwise: its derivative still saves arrays
        between = [v for v in between if gate in _sources(v)[0]]
    instead = 0
    for array in found.arrays:
        narrow = kept_arrays.uncast(array)
        is_own = all(v.made_by == STACKED or _is_between(v, sources) for v in array.users)
        if is_own and narrow.dtype.itemsize < array.dtype.itemsize:
            # The program casts the array to more bits. jaxnorm's functions save it without a cast.
            between.append(array)
            array = narrow
        instead += program.extra_bytes(array)
    members = program.saved_of(between)
    members += program.zeros_like(h)[: bool(members)]  # some derivatives save an array of zeros
    function = "gated_linear" if up else "activation_linear"
    weight = factors[1]
    is_cast = kept_arrays.uncast(weight).dtype.itemsize > weight.dtype.itemsize
    options = f"dtype={weight.dtype.name} and " * is_cast + f"activation={found.activation}"
    what = "down projection {at}" if up else "linear layer {at} and its activation"
    saved = "gate and up are" if up else "the activation's input is"
    dropout = " (its dropout goes into product=)" if bits else ""
    how = f"replace the {what} with jaxnorm.{function}, with {options}{dropout}: only {saved} saved"
    return Advice(function, matmul.source, how, members, instead, matmul.layers)


def _before_dropout(h: Value, bits: set[Value]) -> list[Value]:
    """Return the arrays from which h is computed with the random bits of dropout alone."""
    found = []
    for value in reached([h], _operands):
        others, queue = set[Value](), [h]
        while queue:
            v = queue.pop()
            if v is not value:
                others.add(v)
                queue += _operands(v)
        sources = [v for v in others if not _operands(v)]
        if not bits & _sources(value)[0].keys() and all({*_sources(v)[0]} <= bits for v in sources):
            found.append(value)
    return found


class _Step(NamedTuple):
    """An elementwise function before a matmul.

    Attributes:
      activation: text of the option ``activation``.
      arrays: the activation's operand and, if there is one, the array with which its result is
        multiplied.
    """

    activation: str
    arrays: Sequence[Value]


def _step(h: Value, arrays: Sequence[Value], program: Program) -> _Step | None:
    """Return the activation that computes h from `arrays`, if h has no other operands."""
    if len(arrays) == 1:
        return _verified(h, arrays[0], None)
    found = (_verified(h, gate, up) for gate, up in (arrays, arrays[::-1]))
    product = kept_arrays.uncast(h)
    if (step := next(filter(None, found), None)) or product.made_by != "mul":
        return step
    # Neither array is a factor of h, but h may be a product of a function of each of them, such as
    # gpt-oss' silu(gate) * (clip(up) + 1). The arrays of the larger derivative need not be saved.
    factors = {next(iter(_sources(v)[0])): v for v in product.operands if len(_sources(v)[0]) == 1}
    if len(factors) != 2:
        return None

    def saved(source: Value) -> int:
        own = [
            v for v in program.by_origin if _sources(v)[0].keys() == {source} and v is not source
        ]
        return sum(v.bytes for v in own)

    gate, up = sorted(arrays, key=saved, reverse=True)
    return _verified(product, gate, origin(factors[up]))


def _verified(h: Value, gate: Value, up: Value | None) -> _Step | None:
    """Return the activation f if h is f(gate), or f(gate) * up, and None otherwise."""
    # An axis of another size than the program's cannot be combined with other arrays.
    shape = (1,) * (len(gate.shape) - 1) + (_ELEMENTS,)
    inputs = {gate: shape} if up is None else {gate: shape, up: shape}
    draws = values.draws(inputs, (1.0, 10.0, 100.0))  # also of the size at which functions clip
    try:
        pairs = [(draw.arrays[gate], draw(h)) for draw in draws]
        if up is not None:
            # With the same gate, h must be proportional to up.
            pairs = [(x, y / draw.arrays[up]) for (x, y), draw in zip(pairs, draws)]
            for (x, y), draw in zip(pairs, draws[1:] + draws[:1]):
                other = draw.arrays[up]
                if not values.agree(values.Draw({gate: x, up: other}, draw)(h) / other, y):
                    return None
    except values.UnknownError:
        return None
    if draws[0].drawn:
        return None
    dtypes = [v.dtype for v in reached([h], _operands)]
    name = values.name_of(_ACTIVATIONS, dtypes, pairs)
    return _Step(name or _UNNAMED, [gate] if up is None else [gate, up])


def _operands(value: Value) -> list[Value]:
    """Return the operands of an elementwise operation, of the size of its result."""
    is_step = value.made_by in kept_arrays.ELEMENTWISE and not kept_arrays.is_product(value)
    return value.whole_operands if is_step else []


@functools.cache
def _sources(h: Value) -> tuple[dict[Value, None], bool, bool]:
    """Return three things about the elementwise operations that compute h.

    h is the first operand of a matmul, or an array from which this operand is computed.

    - The arrays of h's size from which the operations start, as the keys of a dict.
    - True if one of the operations is nonlinear.
    - True if no operand of the operations is computed by a reduction, such as the sum over a row in
      a norm or a softmax.
    """
    sources: dict[Value, None] = {}
    is_nonlinear, is_alone = False, True
    stack, seen = [h], set[Value]()
    while stack:
        value = origin(stack.pop())
        if value in seen:
            continue
        seen.add(value)
        if value.size != h.size or value.is_spread:
            is_alone &= not kept_arrays.is_reduced(value, h.size)
        elif value.made_by in kept_arrays.ELEMENTWISE and not kept_arrays.is_product(value):
            is_nonlinear |= value.made_by in kept_arrays.NONLINEAR
            stack += value.operands
        else:
            sources[value] = None
    return sources, is_nonlinear, is_alone


def _is_for(matmul: Value, h: Value, sources: dict[Value, None]) -> bool:
    """Return True if the arrays between `sources` and h are used only to compute this matmul."""

    def before(value: Value) -> list[Value]:
        made_of = [v for v in map(origin, value.operands) if v.size == h.size and not v.is_spread]
        return [v for v in made_of if v not in sources]

    def fits(user: Value) -> bool:
        return user.made_by in kept_arrays.ELEMENTWISE and _is_between(user, sources)

    inside_or_after = reached(reached([h], before), lambda v: filter(fits, v.users))
    users = kept_arrays.users_outside(inside_or_after, inside_or_after)
    return all(user is matmul or user.made_by == STACKED for user in users)


def _is_between(value: Value, sources: dict[Value, None]) -> bool:
    """Return True if an array is computed elementwise, and only from `sources`."""
    own, _, is_alone = _sources(value)
    return bool(own) and is_alone and own.keys() <= sources.keys()
