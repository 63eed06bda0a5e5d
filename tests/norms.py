"""Checks of norms against float64 values, within the bounds of `norm_references`.

`check` tests a public function. `check_forward` and `check_backward` test one pass of an
implementation. `types_of` and `make_operands` derive the operands of a pass from the table of
operations.
"""

import functools
import math

import contract
import jax
import jax.numpy as jnp
import numpy as np
from norm_references import expected
from reference import DTYPES, SAFETY, arithmetic, assert_within, exact, rounding
from specs import build_spec, changed

import jaxnorm
from jaxnorm_kernels import xla
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS


def normal(shape, dtype, seed, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * scale + shift, dtype)


def mixes(*mixed):
    """Return a list of combinations of dtypes for the operands and the result of a call.

    In the first combinations, all dtypes are the same. `mixed` lists the other combinations. In a
    string such as "bbfb", each letter is a dtype: bfloat16, float32 or float16 ("h").
    """
    names = {"b": "bfloat16", "f": "float32", "h": "float16"}
    return [*((d,) * 4 for d in DTYPES), *(tuple(names[d] for d in mix) for mix in mixed)]


def tables(shape, dtype="float32", *, factor=1.0, seed=0):
    """Return `factor` * cos(a) and `factor` * sin(a) for random angles a. YaRN has a factor."""
    angle = np.random.default_rng(seed).uniform(-np.pi, np.pi, size=shape)
    return jnp.asarray(factor * np.cos(angle), dtype), jnp.asarray(factor * np.sin(angle), dtype)


def assert_sums(gradient, like, index, terms):
    """Assert that each element of a gradient is the sum of the terms that belong to it.

    `index` maps each term to its element. `terms` has three arrays: the values of the terms, their
    errors and their magnitudes.
    """
    assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
    value, error, magnitude = (
        np.bincount(index.ravel(), weights=np.broadcast_to(a, index.shape).ravel(),
                    minlength=like.size).reshape(like.shape)
        for a in terms
    )  # fmt: skip
    u = arithmetic(like.dtype.name)
    walk = SAFETY * u * (math.sqrt(index.size / max(like.size, 1)) - 1) * magnitude
    error = error + np.maximum(walk, 0)
    assert_within(gradient, value, error + rounding(np.abs(value) + error, like.dtype.name))


# -------------------------------------------------------------------------------- public functions


def _numbers(shape):
    return np.arange(math.prod(shape)).reshape(shape)


def _spread(shape, of_x, axes):
    """Return, for each element of x, the index of the parameter's element that belongs to it.

    First, x's axes are reordered so that the normalised axes, `axes`, are last. The parameter is
    broadcast to this shape. Then the normalised axes are flattened to the columns, and all other
    axes to the rows. So the result has the shape (rows, cols).
    """
    order = [axis for axis in range(len(of_x)) if axis not in axes] + [*axes]
    cols = math.prod(of_x[axis] for axis in axes)
    return np.broadcast_to(_numbers(shape), [of_x[axis] for axis in order]).reshape(-1, cols)


def to_rows(array, axes):
    """Reshape an array to (rows, cols), where `axes` become the columns.

    This uses NumPy, so it is independent of the library's code.
    """
    array = np.moveaxis(np.asarray(array), axes, range(-len(axes), 0))
    return array.reshape(-1, int(np.prod(array.shape[array.ndim - len(axes) :])))


def check(name, x, *, axis=-1, save=None, y_dtype=None, implementation=None, bias=None, **given):
    """Check the results and all gradients of a public function.

    Args:
      given: the operands except x and bias, and further options. An absent operand is None.
      save: the option `save`; None for a function without this option.
    """
    entry = FUNCTIONS[name]
    op = entry.gated if entry.gated and given.get("gate") is not None else entry.op
    operation = OPERATIONS[op]
    as_named = {"branch_scale": "gate"} if op == "scaled_add_norm" else {}
    operands = {"x": x, "bias": bias}
    for operand in operation.operands[1:]:
        operands.setdefault(operand, given.pop(as_named.get(operand, operand), None))
    operands = {n: a for n, a in operands.items() if a is not None}
    options = given | {"implementation": implementation}
    options |= {"save": save} if save is not None else {}
    options |= {"axis": axis} if axis != -1 else {}
    options |= {"dtype": y_dtype} if y_dtype is not None else {}

    def call(operands):
        named = {as_named.get(n, n): a for n, a in operands.items()}
        named.setdefault("scale", None)
        return jax.tree.leaves(getattr(jaxnorm, name)(**named, **options))

    # Kernels do not compute gradients of tables, and a call that requests one runs XLA's code. So
    # the gradients of tables are computed in a separate call.
    of_tables = {n: a for n, a in operands.items() if OPERANDS[n] == "table"}
    others = {n: a for n, a in operands.items() if n not in of_tables}
    results, vjp = jax.vjp(lambda others: call(others | of_tables), others)
    cotangents = [normal(a.shape, a.dtype, 9 + i) for i, a in enumerate(results)]
    (gradients,) = vjp(cotangents)
    if of_tables:
        _, vjp = jax.vjp(lambda of_tables: call(others | of_tables), of_tables)
        gradients |= vjp(cotangents)[0]

    axes = tuple(sorted(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))))
    index = {
        n: _spread(a.shape, x.shape, axes)
        for n, a in operands.items()
        if OPERANDS[n] not in ("array", "table")
    }
    for n, a in of_tables.items():
        shape = (*x.shape[:-1], a.shape[-1])
        index[n] = np.broadcast_to(_numbers(a.shape), shape).reshape(-1, a.shape[-1])
    found = dict(zip(operation.results, results)) | {f"d{n}": g for n, g in gradients.items()}
    wanted = {"y": y_dtype or x.dtype, "h": operands.get("residual", x).dtype}
    if operation.y_is_sum:
        wanted["y"] = operands["residual"].dtype
    for n in operation.results:
        assert (found[n].shape, found[n].dtype) == (x.shape, wanted[n])
    saves = {"saved": "input" if given.get("activation") and op == "norm" else save or "output"}
    taken = ("epsilon", "activation", "norm_before_gate", "interleaved")
    saves |= {n: given[n] for n in taken if n in given}
    if op == "norm_gated":
        saves |= {"activation": given.get("activation", "silu")}
    # The forward replaces a scale of 0 by a floor, if the output's dtype has enough range.
    lifts = saves["saved"] == "output" and found["y"].dtype.name in ("bfloat16", "float32")
    given = _given(
        operands,
        index,
        given.get("scale_offset", 0.0),
        lambda a: to_rows(a, axes),
        2.0**-60 if lifts else None,
    )
    for n, d in zip(operation.results, cotangents):
        given[f"d{n}"] = to_rows(exact(d), axes)
    second = next((operands[n].dtype.name for n in ("residual", "gate") if n in operands), None)
    dtypes = x.dtype.name, second or x.dtype.name, found["y"].dtype.name
    of_h = to_rows(exact(found["h"]), axes) if "h" in found else None
    reference = expected(op, given, of_h, dtypes, subtract_mean=entry.subtract_mean, **saves)
    assert_expected(reference, found, operands, index, lambda a: to_rows(exact(a), axes))
    return results, gradients


def _given(operands, index, offset, rows, floor=None):
    """Return all operands in float64, expanded to the elements of x.

    Absent operands are replaced by values without effect (a scale of 1, a bias of 0).
    """
    given = {}
    for name, array in operands.items():
        value = exact(array)
        if OPERANDS[name] == "scale":
            value = value + offset
            if floor is not None:
                low = np.abs(value) < floor
                value = np.where(low, np.where(value < 0, -floor, floor), value)
        given[name] = value.reshape(-1)[index[name]] if name in index else rows(value)
    for name, absent in (("scale", 1.0), ("next_scale", 1.0), ("bias", 0.0), ("branch_scale", 1.0)):
        given.setdefault(name, np.full(given["x"].shape, absent))
    return given | dict.fromkeys(("dy", "dh"), np.zeros(given["x"].shape))


def assert_expected(reference, found, operands, index, rows):
    """Assert that errors of results and gradients are at most the bounds of the reference."""
    for name, (value, bound) in reference.rows.items():
        result = found.get(name if name in ("y", "h") else f"d{name}")
        if result is not None:
            if name not in ("y", "h"):
                like = operands[name]
                assert (result.shape, result.dtype) == (like.shape, like.dtype)
            assert_within(rows(result), value, bound)
    for name, terms in reference.terms.items():
        if name in operands and f"d{name}" in found:
            assert_sums(found[f"d{name}"], operands[name], index[name], terms)


# ---------------------------------------------------------------------- passes of an implementation


def make_spec(op, direction, rows, cols, mix, kind="rms_norm", **given):
    """Return the `Spec` of one pass of an operation with a norm. The norm has all its parameters.

    Args:
      mix: the dtypes of x, of the second operand (residual, gate or tables), if any, and of y.
      kind: "layer_norm" or "rms_norm".
      given: other fields of a `Spec`, or flags of `build_spec`.
    """
    x, *second, y = mix
    operation, float32 = OPERATIONS[op], np.dtype("float32")
    options = {"epsilon": 1e-6, "want_stats": direction == "fwd", "scale_dtype": float32}
    options["adds_dh"] = direction == "bwd" and "h" in operation.results
    for name in ("next_scale", "branch_scale"):
        if name in operation.operands:
            options[f"{name}_dtype"] = float32
    for name in ("residual", "gate", "table"):
        if name in operation.operands or (name == "table" and op == "norm_rope"):
            options[f"{name}_dtype"] = second[0]
    if kind == "layer_norm":
        options |= {"bias_dtype": float32, "subtract_mean": True}
    if op == "norm_gated":
        options |= {"saved": "input", "norm_before_gate": True, "activation": "silu"}
    return build_spec(op, direction, rows, cols, x, y, **(options | given))


def grouped(n, kind="layer_norm"):
    """Return the fields of a `Spec` whose x has `n` groups of rows with their own parameters."""
    names = ("scale", "bias", "branch_scale") if kind == "layer_norm" else ("scale", "branch_scale")
    return {f"{name}_groups": n for name in names}


def shape_of(spec, name):
    kind = OPERANDS.get(name, "array")
    if kind == "array":
        return spec.strided if spec.inner > 1 else (spec.rows, spec.cols)
    if kind == "label":
        return (spec.rows,)
    if kind == "table":
        return spec.norm.table_rows.rows, spec.norm.rotated // 2
    if kind in ("mask", "logits_bias"):
        shared = spec.logits.mask_rows if kind == "mask" else spec.softmax.logits_bias_rows
        return shared.rows, spec.cols if shared.has_columns else 1
    groups = getattr(spec.norm, f"{'scale' if name == 'next_scale' else name}_groups")
    size = spec.inner if spec.norm.inner_params else spec.cols
    return (size,) if groups == 1 else (groups, size)


def dtype_of(spec, name):
    """Return the dtype of an operand, a result or a cotangent; None if it is absent."""
    if name in ("y", "dy"):
        return spec.norm.residual_dtype if spec.operation.y_is_sum else spec.y_dtype
    if name in ("h", "dh"):
        return spec.norm.residual_dtype or spec.x_dtype
    if name == "logits_scale":
        return spec.compute_dtype if spec.has(name) else None
    if name in ("mask", "positions"):
        return np.dtype(bool) if spec.has(name) else None
    return spec.dtype(name)


def names_of(spec):
    """Return the names of the arrays that a pass takes, in the order of `contract.call`.

    The list does not have `logits_scale` (a scale for each row's logits), because no kernel
    supports it.
    """
    operation = spec.operation
    if spec.direction == "fwd":
        return [name for name in operation.operands if name != "logits_scale"]
    x, stats = ["x"] * operation.starts_from_x, ["stats"] * bool(operation.statistics)
    others = [f"d{name}" for name in (*operation.results, "h") if name not in ("y", "h")]
    dh = ["dh"] * ("h" in spec.outputs)
    kept = [name for name in operation.also_saved if name != "logits_scale"]
    return [*x, "saved", *stats, *kept, "dy", *others, *dh]


def types_of(spec, labels=np.dtype("int32")):  # noqa: B008
    """Return the shapes and dtypes of a pass's operands."""
    number = jax.ShapeDtypeStruct((spec.rows,), np.dtype("float32"))

    def array(name):
        if name == "stats":
            return (number,) * len(spec.statistics)
        if name in ("entropy", "dentropy") or (name == "dy" and spec.is_loss):
            return number
        name = spec.starts_from if name == "saved" else name
        dtype = labels if name == "labels" else dtype_of(spec, name)
        return None if dtype is None else jax.ShapeDtypeStruct(shape_of(spec, name), dtype)

    return tuple(map(array, names_of(spec)))


def make_operands(spec):
    """Return a dict from the names of operands and cotangents to arrays; None for absent ones."""
    centres = {"x": (0.3, 1), "residual": (0, 2), "gate": (0, 2), "bias": (0, 0.3)}
    centres |= {"scale": (1, 0.3), "next_scale": (1, 0.3), "branch_scale": (0.5, 0.3)}
    found = {}
    for i, name in enumerate((*spec.operation.operands, "dy", "dh")):
        dtype = dtype_of(spec, name)
        if OPERANDS.get(name) == "table":
            found |= zip(("cos", "sin"), tables(shape_of(spec, name), dtype, factor=1.2))
        else:
            shift, scale = centres.get(name, (0, 1))
            shape = shape_of(spec, name)
            found[name] = None if dtype is None else normal(shape, dtype, i, scale, shift)
    return found


def _index(spec, name):
    if OPERANDS[name] == "table":
        segments = spec.norm.table_rows.segments
        kept = [size if has_axis else 1 for size, has_axis in segments]
        of_rows = np.broadcast_to(
            np.arange(spec.norm.table_rows.rows).reshape(kept), [size for size, _ in segments]
        ).reshape(-1)
        return _numbers(shape_of(spec, name))[of_rows]
    numbers = _numbers(shape_of(spec, name)).reshape(-1, spec.cols)
    return np.repeat(numbers, spec.rows // len(numbers), axis=0)


def expected_of(spec, arrays, h):
    """Return three things: a pass's expected values, its operands, and the dict `index`.

    For each operand that broadcasts to x (a parameter or a table), `index` has an integer array of
    x's shape: for each element of x, the index of the operand's element that belongs to it.
    """
    operands = {n: arrays[n] for n in spec.operation.operands if arrays[n] is not None}
    index = {n: _index(spec, n) for n in operands if OPERANDS[n] != "array"}
    given = _given(operands, index, spec.norm.scale_offset, lambda a: a, spec.scale_floor)
    has_h = "h" in spec.outputs or "h" in spec.operation.results
    for name in ("dy", "dh"):
        if name == "dy" or has_h:
            given[name] = exact(arrays[name])
    second = spec.norm.residual_dtype or spec.norm.gate_dtype or spec.x_dtype
    reference = expected(
        spec.op,
        given,
        None if h is None else exact(h),
        (spec.x_dtype.name, second.name, dtype_of(spec, "y").name),
        saved="input" if spec.operation.saves == ("x", "x") else spec.norm.saved,
        subtract_mean=spec.norm.subtract_mean,
        epsilon=spec.norm.epsilon,
        activation=spec.norm.activation,
        norm_before_gate=spec.norm.norm_before_gate,
        interleaved=spec.norm.interleaved,
    )
    return reference, operands, index


def check_forward(call, spec, arrays=None):
    """Check a forward ``call(spec, *operands)``. Return its operands, results and statistics."""
    arrays = make_operands(spec) if arrays is None else arrays
    *results, stats = call(spec, *(arrays[name] for name in names_of(spec)))
    found = dict(zip(spec.operation.results, results))
    reference, operands, index = expected_of(spec, arrays, found.get("h"))
    for name, result in found.items():
        assert result.dtype == dtype_of(spec, name)
    assert_expected(reference, found, operands, index, exact)
    assert len(stats) == (len(spec.statistics) if spec.has_stats else 0)
    for stat, (value, bound) in zip(stats, reference.stats):
        assert stat.dtype == "float32"
        assert_within(stat, value, bound)
    return arrays, found, stats


@functools.cache
def _forward_of(spec):
    """Return XLA's code of a forward, compiled once for all tests of equal calls."""
    return jax.jit(functools.partial(contract.call, xla, spec))


def backward_operands(spec, arrays=None, made=None):
    """Return three things: a dict of arrays, the forward's results, and the backward's operands.

    The dict of arrays maps names of operands and cotangents to arrays. The results are a dict, too.
    The operands are a list in the order that the backward `spec` expects. `made` has the results
    and the statistics of a forward that ran already. If it is None, XLA's code computes them.
    """
    arrays = make_operands(spec) if arrays is None else arrays
    forward = changed(spec, direction="fwd", want_stats=True, adds_dh=False)
    if made is None:
        # XLA's code needs rotary tables that are expanded to one row per row of x.
        operands = [
            arrays[name][_index(spec, name)[:, 0] // arrays[name].shape[1]]
            if OPERANDS[name] == "table"
            else arrays[name]
            for name in names_of(forward)
        ]
        *results, stats = _forward_of(forward)(*operands)
        made = dict(zip(spec.operation.results, results)), stats
    found, stats = made
    saved = (arrays | found)[spec.starts_from]
    taken = arrays | {"saved": saved, "stats": stats}
    return arrays, found, [taken[name] for name in names_of(spec)]


def check_backward(call, spec, arrays=None, made=None):
    """Check a backward ``call(spec, *operands)`` and return its gradients.

    The result is a dict from the name of each operand to its gradient.
    """
    arrays, results, taken = backward_operands(spec, arrays, made)
    if "h" not in spec.outputs:
        arrays = arrays | {"dh": jnp.zeros_like(arrays["dh"])}
    gradients = dict(zip(spec.operation.differentiable, call(spec, *taken), strict=True))
    reference, operands, index = expected_of(spec, arrays, results.get("h"))
    for name, gradient in gradients.items():
        assert (gradient is None) == (arrays[name] is None or OPERANDS[name] == "table")
    found = {f"d{name}": g for name, g in gradients.items() if g is not None}
    assert_expected(reference, found, operands, index, exact)
    return gradients
