"""One call of rms_norm_linear: its static part, and how its arrays lie on a mesh."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import PartitionSpec

from jaxnorm.calls import backends
from jaxnorm.calls.call import Run
from jaxnorm.meshes import sharding
from jaxnorm_kernels.specs import LinearSpec, Name

Function = Literal["rms_norm_linear"]
NAME: Function = "rms_norm_linear"


@dataclasses.dataclass(frozen=True)
class Linear:
    """The static part of a call.

    Its arrays are x (..., cols), weight (cols, features), scale (cols,) and bias (features,), of
    which the last two may be absent; its results y and z (..., features) and rstd (...), those that
    `spec` wants.
    """

    function: ClassVar[Function] = NAME

    spec: LinearSpec
    implementation: Name | None

    def __str__(self) -> str:
        """What a jaxpr shows."""
        spec = self.spec
        text = f"{spec.x_dtype.name} {spec.weight_dtype.name}[{spec.cols},{spec.features}]"
        if spec.activation is not None:
            text += f" {spec.activation}"
        if self.implementation is not None:
            text += f" implementation={self.implementation}"
        return f"({text} -> {spec.y_dtype.name})"

    @property
    def operands(self) -> list[str]:
        """Names of the arrays that the forward takes."""
        scale = [] if self.spec.scale_dtype is None else ["scale"]
        return ["x", "weight", *scale, *([] if self.spec.bias_dtype is None else ["bias"])]

    @property
    def results(self) -> list[str]:
        """Names of the arrays that it returns."""
        spec = self.spec
        wanted = {"y": spec.want_y, "z": spec.want_z, "rstd": spec.want_rstd}
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def with_residuals(self) -> "Linear":
        """The forward, with what its derivative needs beside x."""
        return self._with(want_z=self.spec.activation is not None, want_rstd=True)

    def of(self, *used: str) -> "Linear":
        """The forward whose results are those that are `used`; of z alone, it is called y."""
        rstd = "rstd" in used
        if "y" in used:
            return self._with(want_z="z" in used, want_rstd=rstd)
        if "z" in used:
            return self._with(activation=None, want_z=False, want_rstd=rstd)
        return self._with(want_y=False, want_z=False, want_rstd=rstd)

    def on(self, x: jax.Array, weight: jax.Array) -> "Linear":
        """The same call on arrays of other shapes: a batch, or shards."""
        *lead, cols = x.shape
        return self._with(rows=math.prod(lead), cols=cols, features=weight.shape[1])

    def over(self, cols: int, names: tuple[str, ...]) -> "Linear":
        """The call on shards of columns, of which there are `cols` in all."""
        return self._with(cols=cols, cols_over=names)

    def _with(self, **changes: Any) -> "Linear":
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    def as_seen_by(self, name: str) -> LinearSpec:
        """The spec that the implementation `name` gets."""
        del name
        return self.spec

    def xla(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results by the xla implementation, which takes arrays of any shape."""
        return self._run("xla", arrays)

    def kernel(self, name: str) -> Run:
        """The implementation `name`, through two-dimensional views of the arrays."""

        def run(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
            *lead, cols = x.shape
            results = self._run(name, (x.reshape(self.spec.rows, cols), *others))
            return [a.reshape(*lead, *a.shape[1:]) for a in results]

        return run

    def _run(self, name: str, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
        given = dict(zip(self.operands, arrays))
        results = backends.module(name).rms_norm_linear_fwd(
            given["x"], given["weight"], given.get("scale"), given.get("bias"), self.spec
        )
        return [a for a in results if a is not None]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Over which mesh axes rows, columns and features are split.

    Weight is split along its columns as x is, and gathered where it is stored otherwise (FSDP), or
    where features are split over axes that split x. Where columns are split, the products' sums
    cross the mesh.
    """

    mesh: Any
    rows: tuple[tuple[str, ...], ...]
    cols: tuple[str, ...]
    features: tuple[str, ...]

    @classmethod
    def of(cls, x: Any, weight: Any, mesh: Any) -> "Layout":
        """Of types with shardings. What does not divide an axis does not split it."""
        *rows, cols = (sharding.axes_over(x, axis, mesh) for axis in range(len(x.shape)))
        features = sharding.axes_over(weight, 1, mesh)
        taken = {*sum(rows, ()), *cols}
        return cls(mesh, tuple(rows), cols, () if taken & {*features} else features)

    def spec(self, name: str) -> PartitionSpec:
        """Of an operand or a result, or of the normalised x, ``n``."""
        rows = [names or None for names in self.rows]
        cols, features = self.cols or None, self.features or None
        specs: dict[str, tuple[Any, ...]] = {
            "weight": (cols, features),
            "scale": (cols,),
            "bias": (features,),
            "rstd": (*rows,),
            **dict.fromkeys(("x", "n"), (*rows, cols)),
            **dict.fromkeys(("y", "z"), (*rows, features)),
        }
        return PartitionSpec(*specs[name])


def layout_of(given: dict[str, jax.Array]) -> Layout | None:
    """Of arrays on a mesh with Explicit axes; else None."""
    mesh = sharding.explicit_mesh([jax.typeof(a) for a in given.values()])
    if mesh is None:
        return None
    return Layout.of(jax.typeof(given["x"]), jax.typeof(given["weight"]), mesh)
