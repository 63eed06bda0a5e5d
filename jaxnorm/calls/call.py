"""The static description of a call, and the arrays that each of its passes takes and returns.

An operation has three passes: forward, tangent and backward. The table in
`jaxnorm_kernels.operations` lists the operands, results and residuals of every operation. The
fields `outputs` and `wrt` of a `Spec` select the arrays that one pass takes or returns. Functions
exchange the arrays of a call as a flat list, without absent arrays, in the order of `Call.takes`
and `Call.returns`.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls import backends
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels import launching
from jaxnorm_kernels.implementation import Operands, Residuals, Results, takes_no_inner
from jaxnorm_kernels.operations import OPERANDS, OPERATIONS, PARAMETERS, Kind, Op
from jaxnorm_kernels.specs import Direction, Name, Options, Spec

Arrays = Sequence[jax.Array]
#: A function that computes one pass of a call. It takes the pass's arrays as positional arguments
#: and returns a list of arrays.
Run = Callable[..., list[jax.Array]]

# Calls are interned, so identical layers of a model share one object and its cached properties.
_once = functools.lru_cache(maxsize=4096)
# All existing calls. `_once` evicts calls that were not used recently, but a jaxpr may still refer
# to them. An equal call that is created later must be the same object.
_interned: weakref.WeakValueDictionary[tuple[Any, ...], "Call"] = weakref.WeakValueDictionary()

# Maps options to the names that printed jaxprs show. `saved` is always shown; any other option is
# shown only if it differs from its default.
_SHOWN = {
    "saved": "save",
    "activation": "activation",
    "logits_scale": "scale",
    "logit_softcap": "softcap",
    "teacher_softcap": "teacher_softcap",
    "reverse": "reverse",
    "causal": "causal",
    "label_smoothing": "label_smoothing",
    "z_loss": "z_loss",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The static description of one pass of a call: everything except the arrays' values.

    `Call.of` interns calls: equal calls are the same object, so caches can be keyed on identity.

    Attributes:
      function: name of the public function that the user called, for error messages.
      spec: the operation, its options, and the dtypes and sizes of the arrays as the user passed
        them. ``spec.axes`` equals ``view.axes``.
      view: a `RowView`, which describes how the arrays are reshaped for kernels.
      implementation: name of the implementation that the user requested, or None.
      primitives: name of another public function whose JAX primitives the call binds. If it is
        None, the call binds the primitives of `function`. For example,
        `linear_softmax_cross_entropy` binds the primitives of the cross-entropy.
    """

    function: str
    spec: Spec
    view: RowView
    implementation: Name | None
    primitives: str | None = None

    @classmethod
    @_once
    def of(
        cls,
        function: str,
        spec: Spec,
        view: RowView,
        implementation: Name | None,
        primitives: str | None = None,
    ) -> "Call":
        fields = (function, spec, view, implementation, primitives)
        return _interned.setdefault(fields, cls(*fields))

    @classmethod
    def forward(
        cls,
        function: str,
        op: Op | None,
        view: RowView,
        dtypes: tuple[np.dtype, np.dtype],
        options: Options,
        implementation: Name | None,
    ) -> "Call":
        """Return the call of an operation's forward pass. `dtypes` are the dtypes of x and of y."""
        # `op` is None if the function lacks a variant, such as the one for several labels. The
        # callers have checked that the function has the variant.
        assert op is not None
        spec = Spec(op, "fwd", view.rows, view.cols, *dtypes, (*OPERATIONS[op].results,), options)
        return cls.of(function, spec, view, implementation).with_view(view)

    def __str__(self) -> str:
        """Return a short description of the call, which appears in printed jaxprs."""
        spec = self.spec
        text = f"{spec.x_dtype.name}{list(self.view.shape)} -> {spec.y_dtype.name}"
        if len(self.view.axes) > 1 or self.view.moved:
            text += f" axis={self.view.axes}"
        for name, label in _SHOWN.items():
            value = getattr(spec.options, name, None)
            default = getattr(type(spec.options), name, None)
            if value is not None and (value != default or name == "saved"):
                text += f" {label}" if value is True else f" {label}={value}"
        if self.implementation is not None:
            text += f" implementation={self.implementation}"
        return f"({text})" if not self.wrt else f"({text} wrt={','.join(self.wrt)})"

    @functools.cached_property
    def direction(self) -> Direction:
        return self.spec.direction

    @functools.cached_property
    def wrt(self) -> tuple[str, ...]:
        return self.spec.wrt

    # ------------------------------------------------------------------------- other passes

    @_once
    def with_stats(self) -> "Call":
        """Return the forward pass whose outputs are all results and all row statistics."""
        return self.replaced(outputs=(*self.spec.operation.results, *self.spec.statistics))

    def without_unused(self, used: Sequence[bool]) -> "Call":
        """Return a pass that does not compute unused results, as far as possible.

        `used` has a bool for each result. If a forward pass returns both y and the sum h, the new
        pass omits an unused h. It omits an unused y only if no row statistics are used. The
        gradients of rotary tables are left out of a backward pass if they are unused, because no
        kernel computes them. All other results are computed even if they are unused.
        """
        spec = self.spec
        if spec.returns_tables:
            wanted = dict(zip(spec.wrt, used))
            return self.replaced(wrt=tuple(n for n in spec.wrt if wanted[n] or _is_not_table(n)))
        if spec.direction != "fwd" or not {"y", "h"} <= {*spec.outputs}:
            return self
        if not used[1]:
            return self.replaced(outputs=tuple(name for name in spec.outputs if name != "h"))
        return self if used[0] or any(used[2:]) else self.replaced(outputs=("h",))

    def first(self) -> "Call":
        """Return the call of the first norm, whose result is added to the residual."""
        return self.replaced(spec=self.spec.first)

    @_once
    def tangent(self, wrt: tuple[str, ...], *, takes_h: bool = False) -> "Call":
        """Return the pass that computes tangents of the results from the operands' tangents.

        The pass takes tangents of the operands in `wrt`. If this call is a forward pass, the
        tangent pass returns the tangents of all results. If this call is a backward pass, the
        tangent pass is its transpose: it returns one tangent for each cotangent that the backward
        pass takes.

        If `takes_h` is True, x counts as a second result, named h. The tangent pass then also
        returns x's tangent. Its transpose, the backward pass, takes one more cotangent, named h,
        and adds it to the gradient of x. This is for a norm without a residual addition, if its x
        is also used elsewhere, such as in a residual branch. The cotangent h comes from that use.
        """
        spec, outputs = self.spec, self.spec.outputs
        if spec.direction != "bwd":
            h = ("h",) * takes_h
            stats = spec.statistics if spec.has_stats else ()
            outputs = (*spec.operation.results, *h, *stats)
        elif spec.operation.may_add_dh and "x" not in wrt:
            outputs = tuple(name for name in outputs if name != "h")
        return self.replaced(direction="tan", outputs=outputs, wrt=wrt)

    @_once
    def backward(
        self,
        wrt: tuple[str, ...],
        outputs: tuple[str, ...] | None = None,
        *,
        gradient_dtype: np.dtype | None = None,
    ) -> "Call":
        """Return the backward pass that computes the gradients of the operands in `wrt`.

        It takes a cotangent for each result in `outputs`. If `outputs` is None, it takes the
        cotangents of all results of the operation except h. (h is the sum of x and the residual.)
        For a loss, `gradient_dtype` is the dtype of x's gradient. None means x's own dtype.
        """
        if outputs is None:
            outputs = tuple(name for name in self.spec.operation.results if name != "h")
        changes: dict[str, Any] = {}
        if self.spec.is_loss:
            changes["gradient_dtype"] = gradient_dtype
        if self.spec.is_softmax and "logits_bias" not in wrt:
            changes["logits_bias_dtype"] = None
        return self.replaced(direction="bwd", outputs=outputs, wrt=wrt, **changes)

    def gradient(self) -> "Call":
        """Return the backward pass that takes the cotangents of all results of this forward pass.

        It computes the gradients of all differentiable operands, but not of rotary tables.
        """
        call = self.first() if self.spec.operation.derivative else self
        # Models treat the tables cos and sin as constants, so their gradients are left out.
        wrt = tuple(filter(_is_not_table, call.differentiable))
        return call.backward(wrt, (*call.spec.operation.results,))

    @_once
    def with_view(self, view: RowView) -> "Call":
        """Return the call for an x with another shape, which is `view.shape`.

        This method is used for a shard of x, and for an x with an additional batch axis.
        """
        sizes: dict[str, Any] = {"rows": view.rows, "cols": view.cols, "axes": view.axes}
        if self.spec.is_softmax:
            sizes["logits_bias_shape"] = view.logits_bias
        return self.replaced(view=view, **sizes)

    def widened(self, name: str, parameter: jax.Array) -> tuple["Call", jax.Array]:
        """Cast a parameter to the arithmetic dtype; return the new call and the cast parameter.

        The new call describes the cast parameter. Callers use this method before they broadcast a
        parameter to groups of rows. The gradients of the groups then have the arithmetic dtype, and
        only their sum is rounded to the parameter's dtype.
        """
        dtype = max(parameter.dtype, self.spec.compute_dtype, key=lambda dtype: dtype.itemsize)
        return self.replaced(**{f"{name}_dtype": dtype}), parameter.astype(dtype)

    @_once
    def replaced(self, **changes: Any) -> "Call":
        """Return the call with `changes`: new values of fields of the call or of its spec."""
        fields = {
            f.name: changes.pop(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)
        }
        fields["spec"] = fields["spec"].replaced(**changes)
        return Call.of(*fields.values())

    # ------------------------------------------------------------- what a pass takes and returns

    @functools.cached_property
    def primals(self) -> tuple[str, ...]:
        """Names of the arrays that the forward pass takes."""
        return tuple(filter(self.spec.has, self.spec.operation.operands))

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the forward pass's operands that can have a tangent."""
        names = self.spec.operation.differentiable
        return tuple(name for name in self.primals if name in names)

    @functools.cached_property
    def residual_names(self) -> tuple[str, ...]:
        """Names of the residuals that the tangent and backward passes take, in order.

        The residual named ``saved`` is the operand or result from which the derivative is computed,
        such as y or x.
        """
        operation = self.spec.operation
        x = ("x",) * operation.starts_from_x
        return (*x, "saved", *self.spec.statistics, *filter(self.spec.has, operation.also_saved))

    @functools.cached_property
    def residuals(self) -> int:
        """Number of residuals. They are the first operands of the tangent and backward passes."""
        return len(self.residual_names)

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """A dict from each name in `Operation.also_saved` to its index among the residuals."""
        names = self.spec.operation.also_saved
        return {name: i for i, name in enumerate(self.residual_names) if name in names}

    @functools.cached_property
    def takes(self) -> tuple[str, ...]:
        """Names of the arrays that the pass takes.

        A tangent has the name of its operand, and a cotangent has the name of its result.
        """
        match self.spec.direction:
            case "fwd":
                return self.primals
            case "tan":
                return (*self.residual_names, *self.spec.wrt)
            case _:
                return (*self.residual_names, *self.spec.outputs)

    @functools.cached_property
    def returns(self) -> tuple[str, ...]:
        """Names of the arrays that the pass returns.

        A tangent has the name of its result, and a gradient has the name of its operand.
        """
        match self.spec.direction:
            case "fwd" | "tan":
                return self.spec.outputs
            case _:
                return self.spec.wrt

    @functools.cached_property
    def kinds_taken(self) -> list[Kind]:
        return [*map(self._kind, self.takes)]

    @functools.cached_property
    def kinds_returned(self) -> list[Kind]:
        return [*map(self._kind, self.returns)]

    def _kind(self, name: str) -> Kind:
        if name in self.spec.operation.statistics:
            return "stat"
        return OPERANDS.get(name) or self.spec.operation.results.get(name, "array")

    @functools.cached_property
    def dtypes_returned(self) -> list[np.dtype]:
        """Dtypes of the arrays that the pass returns.

        The gradient of a parameter has the parameter's dtype.
        """
        return [*map(self._dtype, self.returns)]

    def _dtype(self, name: str) -> np.dtype:
        spec = self.spec
        match name:
            case "x" | "y":
                return spec.dx_dtype if name == "x" else spec.y_dtype
            case "h" | "residual":
                return spec.last.x_dtype
            case _ if name in OPERANDS:
                dtype = spec.dtype(name)
                assert dtype is not None
                return dtype
            case _:
                return spec.compute_dtype

    # ------------------------------------------------------------------------------ running it

    def as_seen_by(self, name: str) -> Spec:
        """Return the `Spec` that the implementation `name` receives for this call.

        The spec describes the arrays reshaped to ``(rows, cols)`` or to ``(outer, cols, inner)``
        (the strided view). If the normalised axes are not the last ones, ``(rows, cols)`` needs a
        transpose. The strided view needs none, but not every implementation supports it.
        """
        in_rows, strided = self._in_rows, self._strided
        takes_inner = backends.implementation(name).takes_inner
        if strided is None or takes_inner is takes_no_inner:
            return in_rows
        # A parameter that is `scattered` cannot be reshaped for arrays (rows, cols). Return the
        # strided spec in this case, even if the implementation does not support it. The
        # implementation then refuses the call with a message that says why it does not support the
        # strided spec.
        is_scattered = in_rows.is_norm and in_rows.norm.scattered
        return strided if is_scattered or takes_inner(strided) else in_rows

    @_once
    def refusal(self, name: str) -> str | None:
        """Return the reason why the implementation `name` cannot run the call, or None."""
        return backends.implementation(name).why_unsupported(self.as_seen_by(name))

    def check_implementation(self) -> None:
        """Raise ValueError if the user requested an implementation that cannot run the call."""
        if (name := self.implementation) is not None:
            shape = self.view.rows, self.view.cols
            backends.refuse(self.function, name, self.direction, shape, self.refusal(name))

    @functools.cached_property
    def _in_rows(self) -> Spec:
        """The spec of the call for arrays that are reshaped to ``(rows, cols)``."""
        spec, view = self.spec, self.view
        if spec.is_norm:
            groups = {f"{kind}_groups": view.groups(kind) for kind in PARAMETERS}
            changes: dict[str, Any] = {name: n or 1 for name, n in groups.items()}
            changes |= {"table_rows": view.shared("table"), "scattered": None in groups.values()}
        else:
            changes = {"mask_rows": view.shared("mask")}
        if spec.is_softmax:
            changes["logits_bias_rows"] = view.shared("logits_bias")
            changes["queries"] = view.shape[-2] if spec.softmax.causal else 0
        return spec.replaced(axes=(-1,), moved_axis=view.moved, **changes)

    @functools.cached_property
    def _strided(self) -> Spec | None:
        """The spec for arrays that are reshaped to ``(outer, cols, inner)``, without a transpose.

        The value is None if x or a parameter cannot be reshaped in this way.
        """
        view = self.view
        if view.strided is None:
            return None
        *_, inner, inner_cols = view.strided
        strided = self._in_rows.replaced(moved_axis=False, inner=inner, inner_cols=inner_cols)
        kinds = {kind for name in self.parameters if (kind := self._kind(name)) in PARAMETERS}
        groups = {kind: view.inner_groups(kind) for kind in kinds}
        if groups and None not in groups.values():
            return strided.replaced(
                scattered=False,
                inner_params=True,
                scale_groups=groups.get("scale") or 1,
                bias_groups=groups.get("bias") or 1,
            )
        return strided if inner_cols == 1 or not groups else None

    def xla(self, *arrays: jax.Array) -> list[jax.Array]:
        """Run the xla implementation on the arrays in their own shapes, without reshaping them."""
        return self._run("xla", self.spec, arrays)

    def kernel(self, name: str) -> Run:
        """Return a function that reshapes the arrays for the implementation `name` and runs it."""

        def run(*arrays: jax.Array) -> list[jax.Array]:
            spec, view, kinds = self.as_seen_by(name), self.view, self.kinds_taken
            strided = spec.inner > 1
            if name == "xla" and "mask" in kinds:  # xla needs a mask that has x's full shape
                at = kinds.index("mask")
                whole = jnp.broadcast_to(arrays[at], view.shape)
                arrays = (*arrays[:at], whole, *arrays[at + 1 :])
            rows = [view.to_rows(kind, a, strided=strided) for kind, a in zip(kinds, arrays)]
            rows = self._own_buffers(name, self.takes, rows)
            results = self._run(name, spec, rows)
            results = self._own_buffers(name, self.returns, results)
            kinds = self.kinds_returned
            return [view.from_rows(kind, a, strided=strided) for kind, a in zip(kinds, results)]

        return run

    def _own_buffers(self, name: str, names: Sequence[str], arrays: Arrays) -> list[jax.Array]:
        """Return the arrays, each in a buffer that is not part of another array's buffer.

        A kernel needs aligned arrays, and a slice of another array may be unaligned, so most arrays
        are copied. There are three exceptions:

        - xla needs no alignment.
        - The code of a linear loss aligns its arrays.
        - Residuals that the forward pass computes for the backward pass are aligned. A loop over
          layers may stack them, so that the kernel gets a slice of the stack. If such a slice is
          not aligned, XLA itself copies it to an aligned array.
        """
        if name == "xla" or (self.primitives is not None and self.spec.is_loss):
            return [*arrays]
        saved = ("saved",) * (self.direction != "fwd" and self.spec.starts_from in ("y", "h"))
        in_place = (*saved, *self.spec.statistics)
        return [
            a if n in in_place else launching.own_buffer(a)
            for n, a in zip(names, arrays, strict=True)
        ]

    def _run(self, name: str, spec: Spec, arrays: Arrays) -> list[jax.Array]:
        implementation = backends.implementation(name)
        count = len(self.primals) if spec.direction == "fwd" else self.residuals
        first, linear = self._fields(self.takes[:count], arrays), arrays[count:]
        if spec.direction == "tan":
            assert implementation.tangent is not None  # only xla runs tangent passes
            tangents = Operands(**dict(zip(spec.wrt, linear)))
            return self._picked(implementation.tangent(Residuals(**first), tangents, spec))
        cotangents = Results(**self._fields(spec.outputs, linear))
        if spec.direction == "bwd":
            gradients = implementation.backward(Residuals(**first), cotangents, spec)
            return [getattr(gradients, name) for name in spec.wrt]
        return self._picked(implementation.forward(Operands(**first), spec))

    def _fields(self, names: Iterable[str], arrays: Arrays) -> dict[str, Any]:
        """Return the arrays as fields of `Operands`, `Residuals` or `Results`, in a dict.

        All row statistics are one field, the tuple ``stats``.
        """
        by_name: dict[str, Any] = dict(zip(names, arrays))
        statistics = [by_name.pop(name) for name in self.spec.statistics if name in by_name]
        return {**by_name, "stats": tuple(statistics)} if statistics else by_name

    def _picked(self, results: Results) -> list[jax.Array]:
        by_name = {**results._asdict(), **dict(zip(self.spec.statistics, results.stats))}
        return [array for name in self.spec.outputs if (array := by_name[name]) is not None]


def _is_not_table(operand: str) -> bool:
    return OPERANDS[operand] != "table"
