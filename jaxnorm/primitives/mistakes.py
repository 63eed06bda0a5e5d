"""Errors for calls whose arguments have another library's names, or are in the wrong order."""

import difflib
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax


def _named(ours: str, *others: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(others, tuple(ours.split(" or ")))


# Maps an argument's name in other libraries to suggestions: names of jaxnorm's arguments with the
# same meaning, some with a value. An error shows the first suggestion that the function accepts.
_MEANT = {
    **_named("epsilon", "eps", "norm_eps", "rms_norm_eps", "variance_epsilon"),
    **_named("where", "mask", "attention_mask", "attn_mask", "loss_mask", "padding_mask"),
    **_named("where", "weights", "sample_weight", "sample_weights", "loss_weights"),
    **_named("where=labels != ignore_index", "ignore_index", "ignore_idx"),
    **_named("causal", "is_causal", "causal_mask"),
    **_named("axis", "axes", "dim", "dims", "reduction_axes", "feature_axes", "normalized_shape"),
    **_named("scale or where", "weight"),
    **_named("scale", "gamma", "gain"),
    **_named("bias", "beta", "b"),
    **_named("scale_offset", "offset", "weight_offset"),
    **_named("weight", "kernel", "w", "lin_weight", "embedding"),
    **_named("labels or teacher_logits", "target", "targets", "y", "label"),
    **_named("x or logits or gate", "input", "inputs", "hidden_states", "x", "logits"),
    **_named("logits_scale=1 / temperature or scale=1 / temperature", "temperature", "temp"),
    **_named("scale or logits_scale", "scale", "sm_scale", "softmax_scale"),
    **_named("logit_softcap", "softcap", "soft_cap", "logits_soft_cap", "cap"),
    **_named("label_smoothing", "smoothing", "label_smooth"),
    **_named("z_loss", "lse_square_scale", "z_loss_weight", "z_loss_coefficient"),
    **_named("chunk", "chunk_size", "block_size"),
    **_named("dtype", "out_dtype", "output_dtype", "preferred_element_type"),
    **_named("implementation", "impl", "backend"),
    **_named("activation", "act", "act_fn", "activation_fn"),
}

# Maps other spellings that functions accept to the documented names of the arguments.
_SPELLINGS = {
    "logit_scale": "logits_scale",
    "logits_softcap": "logit_softcap",
    "teacher_logits_softcap": "teacher_logit_softcap",
}


def respelled[T](function: str, ours: Collection[str], options: Mapping[str, T]) -> dict[str, T]:
    """Return the options of a call, a dict, with documented names in place of other spellings.

    Raise TypeError if the call has an argument in both spellings.
    """
    result = dict(options)
    for other in _SPELLINGS.keys() & options.keys():
        if (name := _SPELLINGS[other]) in ours:
            if name in options:
                raise TypeError(f"{function}: got both {name}= and {other}=; expected one of them")
            result[name] = result.pop(other)
    return result


def explain(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    error: Exception,
) -> None:
    """Raise a better error than `error` if a call of a public function has one of two mistakes.

    If the function has no argument of a given name, the new error is a TypeError that suggests a
    name. If the arrays that are passed by position are valid in another order, the new error says
    so.
    """
    name, ours = function.__name__, [*inspect.signature(function).parameters]
    for unknown in options.keys() - {*ours}:
        raise TypeError(_unknown(name, unknown, ours)) from None
    if str(error).startswith(f"{name}: "):
        order = _order(function, arguments, options)
        if moved := [i for i, place in enumerate(order) if i != place]:
            raise type(error)(_swapped(name, ours, moved, arguments)) from error


def _unknown(function: str, name: str, ours: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, ours, 1)
    meant = (text for text in (*_MEANT.get(name, ()), *close) if text.split("=")[0] in ours)
    text = next(meant, "")
    fix = f"; use {text if '=' in text else f'{text}='} in place of {name}=" if text else ""
    given = f"{function}: got an unexpected keyword argument {name!r}"
    return f"{given}; expected one of {', '.join(ours)}{fix}"


def _swapped(
    function: str, names: Sequence[str], moved: Sequence[int], arguments: Sequence[Any]
) -> str:
    given = [
        f"{names[i]} is {arguments[i].dtype.name}[{','.join(map(str, arguments[i].shape))}]"
        for i in moved
    ]
    which = " and ".join(names[i] for i in moved)
    return (
        f"{function}: {', '.join(given)}; expected the order {', '.join(names[: moved[-1] + 1])}; "
        f"are {which} {'swapped' if len(moved) == 2 else 'in another order'}?"
    )


def _order(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> Sequence[int]:
    """Return an order in which the arrays among `arguments` are valid arguments of the function.

    Element i of the result is the index of the argument to pass in place i. If several orders are
    valid, the result is the one that exchanges the fewest arrays of the same shape and dtype and,
    among these, moves the fewest arrays. If no order is valid, nothing is moved.
    """
    unchanged = range(len(arguments))
    given = [_abstract(a) for a in arguments]
    others = {name: _abstract(a) for name, a in options.items()}
    arrays = [i for i in unchanged if isinstance(given[i], jax.ShapeDtypeStruct)]
    structs = {n: a for n, a in others.items() if isinstance(a, jax.ShapeDtypeStruct)}
    orders = []
    for places in itertools.permutations(arrays):
        by_place = dict(zip(arrays, places))
        orders.append([by_place.get(i, i) for i in unchanged])

    def changes(order: Sequence[int]) -> tuple[int, int]:
        pairs = itertools.combinations(order, 2)
        equal = sum(a > b and a in arrays and given[a] == given[b] for a, b in pairs)
        return equal, sum(i != place for i, place in enumerate(order))

    # The given order comes first. If this order is valid here, the user's error is not about the
    # order, but about a value or a differentiated scale.
    for order in sorted(orders, key=changes):

        def ordered(values: Sequence[Any], more: Mapping[str, Any]) -> Any:
            known = dict(zip(arrays, values))
            each = [known.get(place, given[place]) for place in order]  # noqa: B023
            return function(*each, **{**others, **more})

        try:
            jax.eval_shape(ordered, [given[i] for i in arrays], structs)
        except Exception:
            continue
        return order
    return unchanged


def _abstract(a: Any) -> Any:
    """Return the shape and dtype of an array, and any other value unchanged."""
    is_array = hasattr(a, "shape") and hasattr(a, "dtype")
    return jax.ShapeDtypeStruct(a.shape, a.dtype) if is_array else a
