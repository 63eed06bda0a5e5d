"""On a mesh, a linear layer or loss and its gradients exchange no more bytes than plain JAX.

`test_meshes.py` tests what functions of rows exchange. Each function is compiled for eight CPU
devices in three ways:

- on Auto axes, with a stand-in for its kernel;
- on Auto axes, with XLA's code;
- on Explicit axes.

Plain JAX is compiled on Auto axes, where XLA chooses the exchanges. Arrays are float32, because
XLA's CPU code exchanges 16-bit numbers as 32-bit numbers. `mosaic/test_mesh_programs.py` tests the
exchanged dtypes in programs for GPUs.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import log_prob_and_entropy, rms_norm
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import Case, eight_devices, mesh_of
from stand_in import Kernels, as_default

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, eight_devices, pytest.mark.usefixtures("quick_to_compile")]

MESH = {"data": 4, "model": 2}
BATCH, LENGTH, D, HIDDEN, CLASSES = 8, 64, 128, 256, 1024


class Function(NamedTuple):
    """A function that calls jaxnorm, and the same computation in plain JAX.

    Attributes:
      operands: the kinds of its operands, which are keys of `SHAPES`.
      recomputes: True if the backward recomputes a part of the forward in order to save less, and
        gathers the weight again for this. Plain JAX then runs under `jax.checkpoint`.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    operands: str
    recomputes: bool = False


SHAPES = {
    "x": (BATCH, LENGTH, D),
    "hidden": (BATCH, LENGTH, HIDDEN),
    "scale": (D,),
    "weight": (D, HIDDEN),
    "down": (HIDDEN, D),
    "head": (D, CLASSES),
    "labels": (BATCH, LENGTH),
}


def plain_losses(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def plain_log_prob(logits: Any, labels: Any) -> Any:
    return log_prob_and_entropy(logits, labels, 1.0)


FUNCTIONS = {
    "rms_norm_linear": Function(
        jaxnorm.rms_norm_linear,
        lambda x, w, scale: rms_norm(x, scale) @ w,
        "x weight scale",
        recomputes=True,
    ),
    "gated_linear": Function(
        jaxnorm.gated_linear,
        lambda gate, up, w: (jax.nn.silu(gate) * up) @ w,
        "hidden hidden down",
        recomputes=True,
    ),
    "activation_linear": Function(
        jaxnorm.activation_linear,
        lambda x, w: jax.nn.gelu(x) @ w,
        "hidden down",
        recomputes=True,
    ),
    "linear_softmax_cross_entropy": Function(
        functools.partial(jaxnorm.linear_softmax_cross_entropy, chunk=64),
        lambda x, w, labels: plain_losses(x @ w, labels).mean(),
        "x head labels",
    ),
    "losses of linear_softmax_cross_entropy": Function(
        functools.partial(jaxnorm.linear_softmax_cross_entropy, chunk=64, reduction="none"),
        lambda x, w, labels: plain_losses(x @ w, labels),
        "x head labels",
        recomputes=True,
    ),
    "linear_log_prob_and_entropy": Function(
        functools.partial(jaxnorm.linear_log_prob_and_entropy, chunk=64),
        lambda x, w, labels: plain_log_prob(x @ w, labels),
        "x head labels",
        recomputes=True,
    ),
}


class Layout(NamedTuple):
    """How operands are sharded.

    Attributes:
      rows: the mesh axes that split the axes of x before the last.
      features: the mesh axes that split the last axis of x.
      weight: the mesh axes that split the two axes of a weight.
      scale: the mesh axes that split vectors with one element per feature.
    """

    rows: tuple[Any, ...]
    features: Any = None
    weight: tuple[Any, Any] = (None, None)
    scale: Any = None

    def spec(self, kind: str) -> P:
        if kind == "scale":
            return P(self.scale)
        if kind in ("weight", "down", "head"):
            return P(*self.weight)
        return P(*self.rows) if kind == "labels" else P(*self.rows, self.features)


LAYOUTS = {
    "data": Layout(("data", None)),
    "FSDP over inputs": Layout((("data", "model"), None), None, (("data", "model"), None)),
    "FSDP over outputs": Layout((("data", "model"), None), None, (None, ("data", "model"))),
    "tensor, outputs": Layout(("data", None), None, (None, "model")),
    "tensor, inputs": Layout(("data", None), "model", ("model", None), "model"),
    "FSDP and tensor": Layout(("data", None), None, ("data", "model")),
    "sequence and outputs": Layout(("data", "model"), None, (None, "model")),
    "weight alone": Layout((None, None), None, ("data", "model")),
    "features of x and weight": Layout((None, None), "data", ("data", None)),
}
WAYS = ["kernel", "xla", "explicit"]
# In linear layers, the way, the layout and the function interact (`EXCEPTIONS` shows where), so all
# combinations are tested. Losses share their rules. They are tested once in each layout, with
# successive ways, so that each layout occurs with each way.
LOSSES = [name for name in FUNCTIONS if not name.endswith("_linear")]
CASES = [
    pytest.param(name, layout, way, id=f"{name}-{layout}-{way}")
    for name in FUNCTIONS
    for i, layout in enumerate(LAYOUTS)
    for j, way in enumerate(WAYS)
    if name not in LOSSES or (i + j + LOSSES.index(name)) % len(WAYS) == 0
]


def operands(kinds: Sequence[str]) -> list[Any]:
    rng = np.random.default_rng(0)

    def operand(kind: str) -> Any:
        shape = SHAPES[kind]
        if kind == "labels":
            return rng.integers(0, CLASSES, shape).astype(np.int32)
        return rng.normal(size=shape).astype(np.float32)

    return [*map(operand, kinds)]


#: Cases in which devices exchange more bytes if they run jaxnorm than if they run plain JAX. The
#: values are the reasons. A key consists of a function's name, a layout, and a way to compile the
#: function (or "*" for all ways). The *output weight*, "head", is the matrix by which x is
#: multiplied to compute logits.
EXCEPTIONS = {
    # x is replicated over the mesh axes that split the output weight. In plain JAX, all devices
    # along these axes compute the loss of the same rows. jaxnorm splits the rows over the devices,
    # so they must exchange gradients.
    ("linear_softmax_cross_entropy", "weight alone", "*"): "devices share rows out",
    # In plain JAX, devices exchange partial logits and add them up. In jaxnorm, they exchange the
    # output weight and x. The test has only 128 rows, so the logits are no larger than the output
    # weight. Then jaxnorm exchanges more bytes, because it also exchanges x. In training, the
    # logits are larger than the output weight.
    ("linear_softmax_cross_entropy", "tensor, inputs", "*"): "few rows",
    # The losses save no statistics of rows for the backward. So the backward recomputes the
    # statistics, and devices exchange them a second time: 12 bytes per row. Plain JAX under
    # `jax.checkpoint` saves 4 bytes per row instead.
    ("losses of linear_softmax_cross_entropy", "tensor, outputs", "*"): "statistics, twice",
    # x is replicated. In XLA's code, each device normalises only some columns of x. A kernel cannot
    # do this, because it needs whole rows.
    ("rms_norm_linear", "weight alone", "kernel"): "the kernel's rows are whole",
    # JAX first sums the gradient over all devices, and then reshards the sum like the weight.
    ("rms_norm_linear", "sequence and outputs", "explicit"): "the transpose of reshard",
    ("gated_linear", "sequence and outputs", "explicit"): "the transpose of reshard",
    ("activation_linear", "sequence and outputs", "explicit"): "the transpose of reshard",
}


def exchanged(
    function: Callable[..., Any], kinds: Sequence[str], layout: Layout, kind: str
) -> list[hlo.Collective]:
    """Return the collectives of a program that computes a function's gradients.

    The gradients are sharded like the operands. Collectives of scalars are left out.
    """
    mesh = mesh_of(Case("", MESH, P()), kind)
    shardings = [NamedSharding(mesh, layout.spec(kind)) for kind in kinds]
    arrays = [jax.device_put(a, s) for a, s in zip(operands(kinds), shardings)]
    wrt = [i for i, kind in enumerate(kinds) if kind != "labels"]

    def step(*arrays: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            # The cotangent of this sum of sines is computed element by element, so devices need
            # not exchange anything for it.
            results = jax.tree.leaves(function(*arrays))
            return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in results)

        return jax.grad(loss, wrt)(*arrays)

    jitted = jax.jit(step, out_shardings=tuple(shardings[i] for i in wrt))
    text = jitted.lower(*arrays).compile().as_text()
    found = hlo.collectives(text, mesh.size)
    return [each for each in found if not each.array.endswith("[]")]


@functools.cache
def plain_exchanges(name: str, layout: Layout) -> list[hlo.Collective]:
    function = FUNCTIONS[name]
    run = jax.checkpoint(function.plain) if function.recomputes else function.plain
    return exchanged(run, function.operands.split(), layout, "auto")


@pytest.mark.parametrize(("name", "layout", "way"), CASES)
def test_no_more_bytes_than_plain_jax(name, layout, way):
    function = FUNCTIONS[name]
    kinds = function.operands.split()
    its = LAYOUTS[layout]
    run = function.ours
    if way == "explicit" and its.features and name in ("gated_linear", "activation_linear"):
        run = functools.partial(run, out_sharding=P(*its.rows, None))
    with as_default(Kernels()) if way == "kernel" else contextlib.nullcontext():
        found = exchanged(run, kinds, its, "explicit" if way == "explicit" else "auto")
    expected = plain_exchanges(name, its)
    # XLA may gather vectors of parameters more than once. So in programs with XLA's code, only
    # arrays of two or more axes are counted.
    if way == "xla":
        found, expected = ([c for c in side if "," in c.array] for side in (found, expected))
    ours, most = (sum(each.bytes for each in side) for side in (found, expected))
    excepted = any((name, layout, each) in EXCEPTIONS for each in (way, "*"))
    assert (ours > most) == excepted, "\n".join(map(str, ["ours", *found, "plain", *expected]))
