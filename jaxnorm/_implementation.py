"""Which implementation of the contract runs a call, and why."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

from jax import lax

from jaxnorm._kernel_call import kernel_call
from jaxnorm_kernels.specs import Implementation, Spec

# Where each implementation lives. Imported on first use: a kernel backend costs nothing until then.
_MODULES = {"xla": "jaxnorm_kernels.xla", "mosaic": "jaxnorm_kernels.mosaic"}

# What the default tries on a platform, in this order, before xla. Platforms not named run xla; the
# Mosaic kernels run where they are asked for by name.
_CANDIDATES: dict[str, tuple[str, ...]] = {}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs one direction of a call, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def names() -> tuple[str, ...]:
    """The valid values of ``implementation=``, besides None."""
    return tuple(_MODULES)


def choose(spec: Spec, platform: str) -> Choice:
    """The default's choice for `spec` on `platform` ("cpu", "cuda", "rocm", "tpu")."""
    refusals = []
    for name in _CANDIDATES.get(platform, ()):
        refusal = _load(name).supports(spec) or _load(name).prefers(spec)
        if refusal is None:
            return Choice(name, f"the default for {spec.op} {spec.direction} on {platform}")
        refusals.append(f"{name}: {refusal}")
    return Choice("xla", "; ".join(refusals) or f"the default for {platform}")


def forced(spec: Spec, name: str) -> Choice:
    """`name` itself; ValueError with its reason where it cannot run `spec`."""
    refusal = _load(name).supports(spec)
    if refusal is not None:
        raise ValueError(
            f"implementation={name!r} cannot run {spec.op} {spec.direction} of "
            f"({spec.rows}, {spec.cols}): {refusal}; leave implementation out to let jaxnorm choose"
        )
    return Choice(name, "asked for by name")


def run(function: str, spec: Spec, implementation: str | None, *operands: Any) -> Any:
    """Calls `function` of the contract on `operands` with the implementation that `spec` gets.

    Without a name the choice is made for the platform that the computation is *lowered* for, not
    for
    the one at hand while tracing: work placed on the CPU of a GPU host, and exports, come out
      right.
    """
    if implementation is not None:
        return _bind(forced(spec, implementation).name, function, spec)(*operands)
    chosen = {platform: choose(spec, platform).name for platform in _CANDIDATES}
    branches = {p: _bind(name, function, spec) for p, name in chosen.items() if name != "xla"}
    default = _bind("xla", function, spec)
    if not branches:
        return default(*operands)
    return lax.platform_dependent(*operands, default=default, **branches)


def _load(name: str) -> Implementation:
    return cast(Implementation, importlib.import_module(_MODULES[name]))


def _bind(name: str, function: str, spec: Spec) -> Callable[..., Any]:
    """`function` of one implementation over its operands."""
    module = _load(name)

    def bind(spec: Spec) -> Callable[..., Any]:
        return functools.partial(getattr(module, function), spec=spec)

    return bind(spec) if name == "xla" else kernel_call(bind, _bind("xla", function, spec), spec)
