"""Segments: consecutive parts of a program that is not inside a scan, such as unrolled layers.

XLA can run all recomputation of an unrolled model at the beginning of the backward pass, and then
holds the recomputed arrays of all layers in memory. To prevent this, the program is split where
only one array, the residual stream, crosses from a layer to the next. Each segment is recomputed
when its backward pass begins. With a budget, the crossing arrays are saved, so that no segment
needs to recompute another one.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Var

from jaxnorm.remat import costs
from jaxnorm.remat.programs import variables

# A program with fewer crossing arrays, such as a single layer, is not split. With a budget, a split
# layer always saves the array between attention and MLP, which may not fit into a small budget.
_LEAST = 3


def split(known: Sequence[Any], residuals: Collection[Var]) -> tuple[dict[Var, int], list[Var]]:
    """Divide a program into segments, so that one value crosses from each segment to the next.

    Return a dict with the index of each value's segment, and a list of the crossing values. Values
    that depend on no costly operation, such as masks and rotary tables, are not in this list. They
    may cross as well, because they are cheap to recompute in each segment. The number of segments
    minimises a sum of bytes: all crossing values, and the residuals of one segment.

    Args:
      known: the equations of the forward pass.
      residuals: the values that the derivative needs.
    """
    last_use = {v: i for i, e in enumerate(known) for v in variables(e.invars)}
    depends: set[Var] = set()
    live: set[Var] = set()
    crossings: dict[int, Var] = {}
    sizes = []
    for i, e in enumerate(known):
        if costs.is_costly(e) or any(v in depends for v in variables(e.invars)):
            depends.update(e.outvars)
            live.update(v for v in e.outvars if last_use.get(v, -1) > i)
        live -= {v for v in variables(e.invars) if last_use[v] == i}
        if len(live) == 1:
            (crossings[i],) = live
        sizes.append(sum(costs.size(v.aval) for v in e.outvars if v in residuals))
    if not crossings or not any(sizes):
        return {v: 0 for e in known for v in e.outvars}, []
    typical = statistics.median(costs.size(v.aval) for v in crossings.values())
    target = math.sqrt(sum(sizes) * typical)
    anchors: list[Var] = []
    found: dict[Var, int] = {}
    since = 0
    for i, e in enumerate(known):
        found |= dict.fromkeys(e.outvars, len(anchors))
        since += sizes[i]
        if i in crossings and since >= target and costs.size(crossings[i].aval) <= typical:
            anchors.append(crossings[i])
            since = 0
    return (found, anchors) if len(anchors) >= _LEAST else (dict.fromkeys(found, 0), [])


def group(linear: Sequence[Any], of: dict[Var, int], tangents: Collection[Var]) -> list[list[Any]]:
    """Divide the linear equations of a derivative among segments: return a list for each segment.

    `linear` has the equations that depend on tangents, and `tangents` the tangents of arguments.
    `of` maps values that do not depend on tangents to their segments. An equation belongs to the
    last segment of its operands. An equation that depends only on tangents of arguments, such as
    the cast of a weight's tangent, belongs to the first segment that uses it. So the backward pass
    casts a weight's gradient in this segment, and does not hold it in memory until the end.
    """
    place = dict.fromkeys(tangents, 0)
    early: set[Var] = {*tangents}
    chosen = []
    for e in linear:
        operands = [*variables(e.invars)]
        segment = max((of.get(v, place.get(v, 0)) for v in operands), default=0)
        place |= dict.fromkeys(e.outvars, segment)
        if all(v in early or (v not in of and v not in place) for v in operands):
            early.update(e.outvars)
        chosen.append(segment)
    users: dict[Var, int] = {}
    for i in reversed(range(len(linear))):
        e = linear[i]
        later = [users[v] for v in e.outvars if v in users]
        if later and all(v in early for v in e.outvars):
            chosen[i] = min(later)
        for v in variables(e.invars):
            users[v] = min(users.get(v, chosen[i]), chosen[i])
    order = sorted(range(len(linear)), key=chosen.__getitem__)
    groups = itertools.groupby(order, key=chosen.__getitem__)
    return [[linear[i] for i in members] for _, members in groups]
