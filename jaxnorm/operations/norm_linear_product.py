"""What is linear in the tangents of rms_norm_linear, but for its norm, as JAX primitives.

    jaxnorm.rms_norm_linear_tangent   x, rstd, scale, weight, bias, z | dn, dweight, dbias
    jaxnorm.rms_norm_linear_backward  x, rstd, scale, weight, bias, z | dy, dz

They are each other's transpose, and plain JAX: the products that it makes are XLA's. The normalised
x they make again from x and rstd; as primitives they keep no more than their operands.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding

from jaxnorm.calls import backends
from jaxnorm.calls.call import Arrays
from jaxnorm.meshes import sharding
from jaxnorm.operations.norm_linear_call import NAME, Linear, layout_of
from jaxnorm.primitives.registration import registered


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part of what follows the norm: its tangent, or its backward.

    Attributes:
      direction: ``"tan"`` takes `kept` and the tangents of `wrt`, and returns those of y and, where
        the call returns it, of z; ``"bwd"`` takes `kept` and the cotangents of these, and returns
        those of `wrt`.
      kept: names of the operands and results of the call that it takes.
      wrt: which of n (the normalised x), weight and bias have tangents.
    """

    call: Linear
    direction: Literal["tan", "bwd"]
    kept: tuple[str, ...]
    wrt: tuple[str, ...]

    def __str__(self) -> str:
        """What a jaxpr shows."""
        return f"{str(self.call)[:-1]} wrt={','.join(self.wrt)})"

    def to(self, direction: Literal["tan", "bwd"], wrt: Iterable[str]) -> "Product":
        return dataclasses.replace(self, direction=direction, wrt=tuple(wrt))


def bind(product: Product, *arrays: jax.Array) -> list[jax.Array]:
    """The results of the pass."""
    primitive = _PRODUCTS[product.direction]
    results: list[jax.Array] = primitive.bind(*sharding.vary_alike(arrays), product=product)
    return results


def _run(*arrays: jax.Array, product: Product) -> list[jax.Array]:
    """The pass of a product; the backward is what JAX makes of the tangent."""
    count = len(product.kept)
    kept, linear = dict(zip(product.kept, arrays[:count])), arrays[count:]
    if product.direction == "tan":
        return _tangent(product, kept, *linear)

    def transposed(names: Sequence[str]) -> list[jax.Array]:
        tangent = functools.partial(_tangent, product.to("tan", names), kept)
        dtype = product.call.spec.product_dtype
        types = [kept["x"].astype(dtype) if n == "n" else kept[n] for n in names]
        return [*jax.linear_transpose(tangent, *types)([*linear])]

    others = [name for name in product.wrt if name != "weight"]
    found = dict(zip(others, transposed(others))) if others else {}
    if "weight" in product.wrt:
        # Weight's gradient takes the normalised x. XLA would make it beside the forward's, and keep
        # it until here, were it not to wait for dn, which is a product's and written in any case.
        if "n" in found:
            kept["x"], found["n"] = lax.optimization_barrier((kept["x"], found["n"]))
        else:
            kept["x"], *linear = lax.optimization_barrier((kept["x"], *linear))
        (found["weight"],) = transposed(["weight"])
    return [found[name] for name in product.wrt]


def _tangent(product: Product, kept: dict[str, jax.Array], *linear: jax.Array) -> list[jax.Array]:
    layout, spec = layout_of(kept), product.call.spec

    def lie(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if layout is None:
            return arrays
        return {n: sharding.reshard(a, layout.mesh, layout.spec(n)) for n, a in arrays.items()}

    kept, along = lie(kept), lie(dict(zip(product.wrt, linear)))
    tangent: Callable[..., tuple[jax.Array, jax.Array]]
    tangent = backends.module("xla").rms_norm_linear_tan  # type: ignore[attr-defined]
    dy, dz = tangent(
        kept["x"],
        kept["rstd"],
        kept.get("scale"),
        kept["weight"],
        kept.get("z"),
        along.get("n"),
        along.get("weight"),
        along.get("bias"),
        spec=spec,
        out_sharding=None if layout is None else NamedSharding(layout.mesh, layout.spec("z")),
    )
    return [dy, dz] if spec.want_z else [dy]


def _types(*avals: Any, product: Product) -> list[Any]:
    run = functools.partial(_run, product=product)
    return [*jax.make_jaxpr(run)(*avals).out_avals]


def _jvp(primals: Any, tangents: Any, *, product: Product) -> tuple[Any, Any]:
    count = len(product.kept)
    results = bind(product, *primals)
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return results, bind(product, *primals[:count], *linear)
    along = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def function(*moving: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, a in zip(along, moving):
            operands[i] = a
        return _run(*operands, product=product)

    _, moved = jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])
    return results, moved


def _transpose(cotangents: Any, *operands: Any, product: Product) -> list[Any]:
    """Of the tangent: the backward. Of the backward: the tangent."""
    count = len(product.kept)
    kept, linear = operands[:count], operands[count:]
    wanted = [ad.is_undefined_primal(a) for a in linear]
    found: list[Any] = [None] * len(linear)
    if product.direction == "tan" and any(not isinstance(ct, ad.Zero) for ct in cotangents):
        wrt = [name for name, is_wanted in zip(product.wrt, wanted) if is_wanted]
        cotangents = map(ad.instantiate_zeros, cotangents)
        results = iter(bind(product.to("bwd", wrt), *kept, *cotangents))
        found = [next(results) if is_wanted else None for is_wanted in wanted]
    elif product.direction == "bwd":
        along = {n: ct for n, ct in zip(product.wrt, cotangents) if not isinstance(ct, ad.Zero)}
        if along:
            found = bind(product.to("tan", along), *kept, *along.values())
    return [None] * count + [a if is_wanted else None for a, is_wanted in zip(found, wanted)]


def _batch(
    arrays: Arrays, dims: Sequence[int | None], *, product: Product
) -> tuple[Arrays, Sequence[int]]:
    """As plain JAX: the gradient that is taken outside `jax.vmap` has batched the forward."""
    results = jax.vmap(functools.partial(_run, product=product), dims)(*arrays)
    return results, [0] * len(results)


_PRODUCTS = {
    direction: registered(
        f"{NAME}{suffix}",
        types=_types,
        run=_run,
        lower=mlir.lower_fun(_run),
        jvp=_jvp,
        batch=_batch,
        transpose=_transpose,
    )
    for direction, suffix in (("tan", "_tangent"), ("bwd", "_backward"))
}
