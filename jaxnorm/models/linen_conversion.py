"""What `jaxnorm.linen.converted` knows of a model's parameters, and what it saw of its calls."""

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import linen as nn

from jaxnorm.models import conversion
from jaxnorm_kernels.specs import FLOAT_DTYPES, Save


class Stored:
    """Which norms have to keep their input, by parameters with values: a tree of them, or None.

    Two are equal where the same norms do, so that `jax.jit` traces anew only where they differ.
    """

    def __init__(self, params: Any) -> None:
        self.reasons: dict[tuple[str, str], str] = {}  # by the norm's path and its output's dtype
        self._paths: set[str] | None = None
        if params is not None:
            if not isinstance(params, Mapping):
                raise TypeError(
                    f"converted: params is a {type(params).__name__}; expected a model's "
                    'variables, or those of the collection "params": a dictionary'
                )
            params = nn.unbox(params)
            self._paths = set(self._norms(params.get("params", params), ()))

    def _norms(self, tree: Any, path: tuple[str, ...]) -> Iterator[str]:
        """Paths of the norms in a tree, whose parameters it looks at."""
        if not isinstance(tree, Mapping):
            return
        name = "/".join(path)
        if "scale" in tree:
            yield name
            parameters = [tree[p] for p in ("scale", "bias") if p in tree]
            for dtype in FLOAT_DTYPES:
                why = conversion.why_input(parameters, np.dtype(dtype))
                if why is not None:
                    self.reasons[name, dtype] = why
        for key, subtree in tree.items():
            yield from self._norms(subtree, (*path, key))

    def knows(self, path: str) -> bool:
        """Whether the parameters have this norm; True where there are none to look at."""
        return self._paths is None or path in self._paths

    def __hash__(self) -> int:
        return hash(frozenset(self.reasons))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stored) and self.reasons.keys() == other.reasons.keys()


class Seen:
    """The calls of modules inside a context.

    Attributes:
      modules: names of the classes of all modules.
      has_norms: whether norms were among them, Flax's or jaxnorm's.
      norms: paths of Flax's norms, and for each why it was left to Flax, or None.
      kept: paths of the norms that keep their input, and why.
      unknown: paths of the norms that the parameters that were given do not have.
      calls: the functions for classes, and where they were used.
      own: names of Flax's subclasses that were left because of code of their own.
    """

    def __init__(self, calls: conversion.Calls) -> None:
        self.calls = calls
        self.own: dict[str, None] = {}
        self.modules: set[str] = set()
        self.has_norms = False
        self.norms: dict[str, str | None] = {}
        self.kept: dict[str, str] = {}
        self.unknown: dict[str, str] = {}

    def note_left(self, norm: nn.Module, flax: Collection[type]) -> None:
        """Note the class of a norm that is left to Flax, if it has code of its own."""
        if conversion.converted_as(type(norm), flax) is None:
            self.own[type(norm).__name__] = None

    def judged(
        self, stored: Stored, path: str, parameters: Mapping[str, Any], y_dtype: np.dtype
    ) -> Save:
        """What a norm saves that is to save its output, by its parameters or by those `stored`."""
        if "scale" not in parameters:
            return "output"
        if conversion.are_known(parameters.values()):
            why = conversion.why_input(parameters.values(), y_dtype)
        else:
            why = stored.reasons.get((path, y_dtype.name))
            if not stored.knows(path):
                self.unknown[path] = "params has no such norm"
        if why is None:
            return "output"
        self.kept[path] = why
        return "input"

    def tell(self, settings: Hashable, around: Hashable) -> None:
        """Says at a context's end what is not as it was meant.

        `settings` are the context's, `around` those of the one around it, or None.
        """
        if around is not None:
            _seen_before.setdefault(around, set())  # That one has something inside.
        left = {path: why for path, why in self.norms.items() if why is not None}
        before = _seen_before.get(settings)
        is_part = before is not None and self.modules <= before  # jax.jit had traced the rest
        names = before if before and is_part else self.modules
        conversion.log(
            "linen.converted",
            len(self.norms),
            {
                "are left to Flax": left,
                conversion.KEPT: self.kept,
                "were not looked at": self.unknown,
            },
            self.calls.sentences(self.own, names) if self.modules else (),
        )
        _seen_before[settings] = self.modules | (before or set())
        if self.has_norms or self.calls.applied or is_part:
            return  # What jax.jit has compiled calls no module again.
        if not self.modules:
            conversion.warn(
                "jaxnorm.linen.converted: no linen module was called inside it, so nothing is "
                "converted; put it around calls of init and apply, not around what makes a model"
            )
            return
        conversion.warn(
            "jaxnorm.linen.converted: no linen.LayerNorm, RMSNorm or GroupNorm was called "
            "inside it, only %s; norms of other classes can call jaxnorm.layer_norm and "
            "jaxnorm.rms_norm, by calls={class: function}",
            ", ".join(sorted(name.rpartition(".")[2] for name in self.modules)),
        )


#: Names of the classes of the modules that were called inside contexts of the same settings.
_seen_before: dict[Hashable, set[str]] = {}
