"""Checks of norms, whose bounds `program_error` derives from the equations of XLA's code.

`check` compares a public function with the same formula in plain JAX, evaluated in float64.
`check_forward` and `check_backward` compare one pass of a kernel with XLA's code in float64.
`types_of` and `make_operands` derive the operands of a pass from the table of operations.
"""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
from program_error import analyse, assert_analysed, assert_computes, values_of
from specs import build_spec, changed

import jaxnorm
from jaxnorm_kernels import xla
from jaxnorm_kernels.operations import OPERANDS, OPERATIONS


def normal(shape, dtype, seed, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * scale + shift, dtype)


def tables(shape, dtype="float32", *, factor=1.0, seed=0):
    """Return `factor` * cos(a) and `factor` * sin(a) for random angles a. YaRN has a factor."""
    angle = np.random.default_rng(seed).uniform(-np.pi, np.pi, size=shape)
    return jnp.asarray(factor * np.cos(angle), dtype), jnp.asarray(factor * np.sin(angle), dtype)


# -------------------------------------------------------------------------------- public functions


def composed(
    name, axis, x, scale=None, bias=0.0, residual=None, gate=1.0, next_scale=None, cos=None,
    sin=None, *, raises=False, epsilon=1e-6, scale_offset=0.0, activation=None,
    norm_before_gate=True, interleaved=False,
):  # fmt: skip
    """Compute the norm `name` in plain JAX, and return a list of its results.

    `axis` is a sorted tuple. If `raises`, scales near 0 are replaced as in the forward pass of a
    norm that saves its output. The gradient of a replaced scale is that of its replacement.
    """
    axes = tuple(range(-len(axis), 0))
    x, residual, gate = (
        jnp.moveaxis(a, axis, axes) if np.shape(a) == x.shape else a for a in (x, residual, gate)
    )

    def gain(scale):
        g = 1.0 if scale is None else scale + scale_offset
        floor = 2.0**-60
        raised = jnp.where(g < 0, -floor, floor)
        return g + jax.lax.stop_gradient(jnp.where(raises & (jnp.abs(g) < floor), raised - g, 0.0))

    def norm(x, scale):
        if "layer" in name:
            x = x - x.mean(axes, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(axes, keepdims=True) + epsilon) * gain(scale) + bias

    def activated(a):
        return a if activation is None else getattr(jax.nn, activation)(a)

    if name == "rms_norm_add":
        results = [residual + norm(x, scale)]
    elif name == "rms_norm_add_rms_norm":
        h = residual + norm(x, scale)
        results = [norm(h, next_scale), h]
    elif residual is not None:
        h = residual + gate * x
        results = [norm(h, scale), h]
    elif name == "rms_norm_gated":
        a = activated(gate)
        results = [norm(x, scale) * a if norm_before_gate else norm(x * a, scale)]
    elif cos is not None:
        n, pairs = norm(x, scale), cos.shape[-1]
        columns = np.arange(2 * pairs).reshape((pairs, 2) if interleaved else (2, pairs))
        first, second = columns.T if interleaved else columns
        a, b = n[..., first], n[..., second]
        n = n.at[..., first].set(a * cos - b * sin)
        results = [n.at[..., second].set(b * cos + a * sin)]
    else:
        results = [activated(norm(x, scale))]
    return [jnp.moveaxis(y, axes, axis) for y in results]


def derived(function):
    """Return a function of operands and cotangents: the results of `function`, and all gradients.

    Kernels do not compute gradients of tables, and a call that requests one runs XLA's code. So the
    gradients of tables are computed in a separate call.
    """

    def run(operands, cotangents):
        tables = {n: a for n, a in operands.items() if n in ("cos", "sin")}
        others = {n: a for n, a in operands.items() if n not in tables}
        results, vjp = jax.vjp(lambda others: function(others | tables), others)
        of_tables = {}
        if tables:
            of_tables = jax.vjp(lambda tables: function(others | tables), tables)[1](cotangents)[0]
        return results, vjp(cotangents)[0] | of_tables

    return run


def expected_of(name, operands, cotangents, axis=-1, save=None, **options):
    """Return the results of a public function and all gradients in float64.

    The arguments are as for `check`.
    """
    if name == "rms_norm_gated":
        options.setdefault("activation", "silu")
    ndim = operands["x"].ndim
    axes = tuple(sorted(a % ndim for a in np.atleast_1d(axis).tolist()))
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (operands, cotangents))
    with jax.enable_x64(True):
        plain = functools.partial(composed, name, axes, **options)
        return values_of(analyse(derived(lambda operands: plain(**operands)), *wide))


def check(name, x, *, axis=-1, save=None, y_dtype=None, implementation=None, **given):
    """Check the results and all gradients of a public function, and return both.

    The expected values are those of `composed`, and the bounds those of XLA's code.

    Args:
      given: the operands except x, and further options. An absent operand is None.
      save: the option `save`; None for a function without this option.
    """
    names = {"residual", "gate", "scale", "next_scale", "bias", "cos", "sin"} & {*given}
    operands = {"x": x} | {n: given[n] for n in sorted(names) if given[n] is not None}
    options = {n: option for n, option in given.items() if n not in names}
    options |= {"axis": axis} if axis != -1 else {}
    options |= {"save": save} if save is not None else {}
    more = {} if y_dtype is None else {"dtype": y_dtype}

    def ours(operands, implementation="xla"):
        given = {"scale": None} | operands | options | more
        return jax.tree.leaves(getattr(jaxnorm, name)(**given, implementation=implementation))

    types = jax.eval_shape(ours, operands)
    of_y = operands["residual"] if name == "rms_norm_add" else x
    assert [a.shape for a in types] == [x.shape] * len(types)
    assert types[0].dtype == (y_dtype or of_y.dtype)
    assert all(h.dtype == operands["residual"].dtype for h in types[1:])
    cotangents = [normal(a.shape, a.dtype, 9 + i) for i, a in enumerate(types)]
    run = derived(functools.partial(ours, implementation=implementation))
    results, gradients = run(operands, cotangents)
    for n, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (operands[n].shape, operands[n].dtype)
    # The forward replaces a scale of 0 by a floor, if the output's dtype has enough range.
    is_saved = save == "output" and options.get("activation") is None
    raises = is_saved and types[0].dtype.name in ("bfloat16", "float32")
    expected = expected_of(name, operands, cotangents, raises=raises, **options)
    assert_computes((results, gradients), derived(ours), operands, cotangents, expected=expected)
    return results, gradients


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


def of_xla(spec):
    """Return XLA's code of a pass. A row of a rotary table may belong to several rows of x."""

    def run(*operands):
        if not spec.is_norm or spec.norm.table_rows is None:
            return contract.call(xla, spec, *operands)
        segments = spec.norm.table_rows.segments
        sizes = [size if has_axis else 1 for size, has_axis in segments]
        of_rows = np.broadcast_to(
            np.arange(spec.norm.table_rows.rows).reshape(sizes), [size for size, _ in segments]
        ).reshape(-1)
        expanded = [
            a[of_rows] if name in ("cos", "sin") else a for name, a in zip(names_of(spec), operands)
        ]
        return contract.call(xla, spec, *expanded)

    return run


def assert_computes_pass(results, spec, operands):
    """Assert that the results of a pass are those of XLA's code in float64.

    A kernel adds in another order than XLA's code, so its errors are added to those of that code.
    """
    program = of_xla(spec)
    types = jax.eval_shape(program, *operands)
    results = jax.tree.map(lambda _, a: a, types, results)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(results)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(types)
    ]
    analysed = analyse(program, *operands)
    assert_analysed(results, analysed, analysed)


def check_forward(call, spec, arrays=None):
    """Check a forward ``call(spec, *operands)``. Return its operands, results and statistics."""
    arrays = make_operands(spec) if arrays is None else arrays
    operands = [arrays[name] for name in names_of(spec)]
    *results, stats = made = call(spec, *operands)
    assert_computes_pass(tuple(made), spec, operands)
    return arrays, dict(zip(spec.operation.results, results)), stats


@functools.cache
def _forward_of(spec):
    """Return XLA's code of a forward, compiled once for all tests of equal calls."""
    return jax.jit(of_xla(spec))


def backward_operands(spec, arrays=None, made=None):
    """Return three things: a dict of arrays, the forward's results, and the backward's operands.

    The dict of arrays maps names of operands and cotangents to arrays. The results are a dict, too.
    The operands are a list in the order that the backward `spec` expects. `made` has the results
    and the statistics of a forward that ran already. If it is None, XLA's code computes them.
    """
    arrays = make_operands(spec) if arrays is None else arrays
    forward = changed(spec, direction="fwd", want_stats=True, adds_dh=False)
    if made is None:
        *results, stats = _forward_of(forward)(*[arrays[name] for name in names_of(forward)])
        made = dict(zip(spec.operation.results, results)), stats
    found, stats = made
    saved = (arrays | found)[spec.starts_from]
    taken = arrays | {"saved": saved, "stats": stats}
    return arrays, found, [taken[name] for name in names_of(spec)]


def check_backward(call, spec, arrays=None, made=None):
    """Check a backward ``call(spec, *operands)`` and return its gradients.

    The result is a dict from the name of each operand to its gradient.
    """
    arrays, _, taken = backward_operands(spec, arrays, made)
    gradients = call(spec, *taken)
    assert_computes_pass(tuple(gradients), spec, taken)
    return dict(zip(spec.operation.differentiable, gradients, strict=True))
