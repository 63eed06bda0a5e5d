"""Dispatch: which implementation runs, how it is lowered, and what a new one must provide.

In these tests, a stand-in replaces the kernels of an accelerator. It calls XLA's functions and adds
a constant to their results, so that a test can see whether it ran. It has no differentiation rule.
"""

import functools
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from program_error import assert_computes
from specs import build_spec

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm_kernels import launching, xla
from jaxnorm_kernels.implementation import Implementation, Results
from jaxnorm_kernels.mosaic import support
from jaxnorm_kernels.mosaic.device import mgpu

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SHIFT = 100.0
HERE = backends.local_platform()
THERE = "cuda" if HERE == "cpu" else "cpu"


@jax.custom_jvp
def opaque(y):
    return y + jnp.asarray(SHIFT, y.dtype)


@opaque.defjvp
def _opaque_jvp(primals, tangents):
    raise AssertionError("a kernel was differentiated instead of its xla fallback")


class Stub(types.ModuleType):
    """A module of stand-in kernels. It adds a constant to forward results, to show that it ran."""

    backward = staticmethod(xla.backward)

    @staticmethod
    def forward(operands, spec):
        results = xla.forward(operands, spec)
        return results._replace(y=opaque(results.y))

    @staticmethod
    def why_unsupported(spec):
        return "it has no masked kernel" if spec.has("mask") else None

    @staticmethod
    def why_not_default(spec):
        return "rows of 7 are faster there" if spec.cols == 7 else None

    @property
    def IMPLEMENTATION(self):  # noqa: N802
        return Implementation(
            self.forward, self.backward, self.why_unsupported, self.why_not_default
        )


@pytest.fixture
def stub(monkeypatch):
    """Register the stand-in, and yield a function ``f(*platforms)``.

    A call of ``f`` makes the stand-in the default implementation on these platforms.
    """
    monkeypatch.setitem(sys.modules, "jaxnorm_kernels_stub", Stub("jaxnorm_kernels_stub"))
    monkeypatch.setitem(backends.MODULES, "stub", "jaxnorm_kernels_stub")
    jax.clear_caches()
    yield lambda *platforms: monkeypatch.setattr(
        backends, "_CANDIDATES", dict.fromkeys(platforms, ("stub",))
    )
    jax.clear_caches()


X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
MASK = jax.ShapeDtypeStruct((1, 8), bool)


def test_the_default_follows_the_platform_lowered_for(stub):
    stub(THERE)
    here = jax.jit(jaxnorm.rms_norm)
    np.testing.assert_array_equal(here(X), jaxnorm.rms_norm(X, implementation="xla"))
    there = here.trace(X).lower(lowering_platforms=(THERE,)).as_text()
    assert "1.000000e+02" in there
    assert "1.000000e+02" not in here.trace(X).lower().as_text()


def test_the_default_runs_a_candidate_of_this_platform(stub):
    stub(HERE)
    for f in (jaxnorm.softmax, jax.jit(jaxnorm.softmax), jax.vmap(jaxnorm.softmax)):
        assert_computes(f(X), lambda x: jaxnorm.softmax(x, implementation="xla") + SHIFT, X)


def test_refused_and_unpreferred_calls_run_xla(stub):
    stub(HERE)
    mask = X > 0
    np.testing.assert_array_equal(
        jaxnorm.softmax(X, where=mask), jaxnorm.softmax(X, where=mask, implementation="xla")
    )
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(X[:, :7]), jaxnorm.rms_norm(X[:, :7], implementation="xla")
    )


def test_a_name_is_honoured_or_refused_with_the_reason(stub):
    stub()
    assert (jaxnorm.rms_norm(X[:, :7], implementation="stub") > SHIFT / 2).all()
    refusal = r"softmax: implementation='stub' cannot run the forward of \(3, 8\): it has no masked"
    with pytest.raises(ValueError, match=refusal + " kernel; leave"):
        jaxnorm.softmax(X, where=X > 0, implementation="stub")


def test_third_derivatives_are_those_of_the_twin(stub):
    """Higher derivatives are computed by XLA's code: the stand-in cannot be differentiated.

    The stand-in adds a constant to y. But this norm saves its input, so the backward reads x and
    rstd, and not y. Therefore the derivatives must equal those of XLA's code, whether the stand-in
    is requested or is the default.
    """
    stub(HERE)

    def cubic(implementation):
        def f(t):
            y = jaxnorm.rms_norm(t * X, save="input", epsilon=1.0, implementation=implementation)
            return jnp.sum(y * jnp.arange(8.0))

        return jax.grad(jax.grad(jax.grad(f)))

    t = jnp.float32(0.5)
    for implementation in ("stub", None):
        assert_computes(cubic(implementation)(t), cubic("xla"), t)


def test_implementation_for(stub):
    stub(THERE)
    plan = jaxnorm.implementation_for("softmax", (4, 8), jnp.bfloat16, platform=THERE)
    assert (plan.forward.name, plan.backward.name) == ("stub", "stub")
    plan = jaxnorm.implementation_for("softmax", (4, 8), "bfloat16", where=MASK, platform=THERE)
    assert plan.forward.name == "xla"
    assert "it has no masked kernel" in str(plan)
    plan = jaxnorm.implementation_for("rms_norm", (4, 7), "float32", platform=THERE)
    assert plan.forward.reason == "stub: rows of 7 are faster there"
    plan = jaxnorm.implementation_for(
        "rms_norm", (4, 7), "float32", platform=THERE, implementation="stub"
    )
    assert plan.backward == backends.Choice("stub", "asked for by name")
    plan = jaxnorm.implementation_for("layer_norm", (4, 7), "float32")
    assert str(plan).splitlines() == [
        f"forward:  xla (the default for {HERE})",
        f"backward: xla (the default for {HERE})",
    ]


def test_the_environment_names_the_default(stub, monkeypatch):
    """The implementation that JAXNORM_IMPLEMENTATION names has precedence over all others.

    It runs every call that it supports, even a call for which it would not be the default. The
    order of the other implementations is unchanged.
    """
    monkeypatch.setitem(backends.MODULES, "second", "jaxnorm_kernels_stub")
    stub()
    monkeypatch.setattr(backends, "_CANDIDATES", {HERE: ("second", "stub")})

    def plan(cols=8, platform=HERE, **options):
        function = "softmax" if options else "rms_norm"
        return jaxnorm.implementation_for(
            function, (4, cols), "float32", platform=platform, **options
        )

    monkeypatch.setattr(backends, "_PREFERRED", "stub")
    chosen = backends.Choice("stub", "asked for by JAXNORM_IMPLEMENTATION")
    assert plan().forward == plan().backward == chosen
    assert plan(cols=7).forward == chosen  # without the variable, XLA's code is the default here
    assert plan(where=MASK).forward == backends.Choice(
        "xla", "stub: asked for by JAXNORM_IMPLEMENTATION, it has no masked kernel"
    )
    assert plan(platform=THERE).forward == backends.Choice(
        "xla", f"stub: asked for by JAXNORM_IMPLEMENTATION, it has no kernels for {THERE}"
    )
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(X[:, :7]), jaxnorm.rms_norm(X[:, :7], implementation="stub")
    )
    # `implementation=` has precedence over the environment.
    assert plan(implementation="xla", causal=False).forward.reason == "asked for by name"

    monkeypatch.setattr(backends, "_PREFERRED", "xla")
    jax.clear_caches()
    assert plan().forward == backends.Choice("xla", chosen.reason)
    assert not backends.has_kernels(None, HERE)
    np.testing.assert_array_equal(jaxnorm.rms_norm(X), jaxnorm.rms_norm(X, implementation="xla"))


def test_what_cannot_be_imported_is_no_default(stub, monkeypatch):
    stub(HERE)
    monkeypatch.setitem(backends.MODULES, "gone", "jaxnorm_kernels.no_such_backend")
    monkeypatch.setattr(backends, "_CANDIDATES", {HERE: ("gone", "stub")})
    monkeypatch.setattr(backends, "_PREFERRED", "gone")
    reason = jaxnorm.implementation_for("rms_norm", (4, 8), "float32").forward.reason
    assert reason.startswith(f"the default for norm fwd on {HERE}; gone: asked for by JAXNORM_")
    assert "it cannot be imported: No module named" in reason


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Return a function ``make(name)`` that registers an implementation whose import fails.

    ``imports = make(name)`` is a function without arguments. Call ``imports()`` to get a list of
    all failed imports so far: the names of the implementations that jaxnorm tried to import, in
    order. A name occurs twice if its import was tried twice.
    """
    monkeypatch.setattr(backends, "_failures", {})
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.syspath_prepend(tmp_path)
    counts = tmp_path / "counts"

    def make(name, code="raise ImportError('no such thing')"):
        module = f"jaxnorm_broken_{name}"
        count = f"with open({str(counts)!r}, 'a') as f:\n    f.write('{name} ')\n"
        (tmp_path / f"{module}.py").write_text(f"{count}{code}\n")
        monkeypatch.setitem(backends.MODULES, name, module)
        return lambda: counts.read_text().split() if counts.exists() else []

    yield make
    jax.clear_caches()


@pytest.fixture
def lowering(monkeypatch):
    """Forget which kernels could not be lowered, before and after a test."""
    monkeypatch.setattr(backends, "_unlowered", {})
    monkeypatch.setattr(backends, "_warned", set())
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_failing_import_is_tried_once(broken, monkeypatch):
    imports = broken("mosaic")
    monkeypatch.setattr(backends, "_CANDIDATES", {HERE: ("mosaic",)})
    for cols in range(4, 8):
        reason = jaxnorm.implementation_for("rms_norm", (4, cols), "float32").forward.reason
        assert reason == "mosaic: it cannot be imported: no such thing"
        message = (
            "rms_norm: implementation='mosaic' cannot be imported: no such thing; leave "
            "implementation out to let jaxnorm choose"
        )
        with pytest.raises(ValueError, match=message):
            jaxnorm.rms_norm(X[:, :cols], implementation="mosaic")
    assert imports() == ["mosaic"]


def test_an_import_may_fail_in_any_way(broken):
    broken("mosaic", "import jax\njax.no_such_name")
    reason = jaxnorm.implementation_for("softmax", (4, 8), "float32", platform="cuda").forward
    assert "mosaic: it cannot be imported: AttributeError: module 'jax' has no" in reason.reason


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import jaxnorm.no_such_module", "No module named"),
        ("from jaxnorm_kernels.specs import no_such_name", "cannot import name"),
        ("import jaxnorm_kernels.specs as specs; specs.no_such_name", "no attribute"),
        ("from jaxnorm_kernels.specs import Spec; Spec.no_such_name", "no attribute"),
        ("no_such_name", "not defined"),
        ("None + 1", "unsupported operand"),
    ],
)
def test_a_bug_of_ours_is_no_missing_package(code, error, broken, monkeypatch):
    """An import that fails because of jaxnorm's own code raises the error, even by default."""
    broken("mosaic", code)
    monkeypatch.setattr(launching, "TESTED", (jax.__version__,))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"because of a bug of jaxnorm, .*{error}"):
            jaxnorm.implementation_for("softmax", (4, 8), "float32", platform="cuda")
    # With another version of JAX, a function of JAX may have changed.
    monkeypatch.setattr(launching, "TESTED", ("0.1",))
    if code in ("no_such_name", "None + 1"):
        reason = jaxnorm.implementation_for("softmax", (4, 8), "float32", platform="cuda").forward
        said = (
            rf"it cannot be imported: .*{error}.* \(with jax {jax.__version__}, .* with jax 0\.1\)"
        )
        assert re.search(said, str(reason))


# Changes of JAX's private API that break Mosaic's kernels when they are lowered.
CHANGES = {
    "a removed function": lambda patch: patch.delattr(mgpu.utils, "getelementptr"),
    "a removed operation": lambda patch: patch.delattr(mgpu.llvm, "load"),
    "another signature": lambda patch: patch.setattr(mgpu.utils, "c", lambda: None),
    "another result": lambda patch: patch.setattr(mgpu.utils, "memref_ptr", lambda ref: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_cannot_be_lowered_is_no_default(change, lowering, monkeypatch, caplog):
    """By default, XLA's code runs, with one warning that names the versions of JAX."""
    CHANGES[change](monkeypatch)
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    scale, labels = jnp.ones(1024), jnp.zeros(2048, jnp.int32)

    def loss(x):
        y = jaxnorm.layer_norm(jaxnorm.softmax(x), scale, scale)
        return jaxnorm.softmax_cross_entropy_with_integer_labels(y, labels).mean()

    program = jax.jit(jax.value_and_grad(loss)).trace(x)
    assert "mosaic_gpu" not in program.lower(lowering_platforms=("cuda",)).as_text()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jaxnorm", "WARNING")
    message = "jaxnorm: .* runs without the default implementation 'mosaic': its kernel cannot be "
    tested = f"with jax {jax.__version__}, jaxlib .*; the kernels were tested with jax 0"
    assert re.match(f"{message}lowered: .*{tested}", record.getMessage())
    plan = jaxnorm.implementation_for("softmax", x.shape, x.dtype, platform="cuda")
    assert plan.forward.name == plan.backward.name == "xla"
    assert "mosaic: its kernel cannot be lowered" in plan.forward.reason
    named = jax.jit(lambda x: jaxnorm.softmax(x, implementation="mosaic")).trace(x)
    message = "softmax: implementation='mosaic': its kernel cannot be lowered: .*"
    with pytest.raises(ValueError, match=message + tested):
        named.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("preferred", [None, "stub"])
def test_the_lowering_of_a_kernel_fails_once(preferred, stub, lowering, monkeypatch, caplog):
    """The values are those of XLA's code. Other calls still run kernels."""
    lowered = []

    @jax.jit
    def unfinished(y):
        return failing.bind(jnp.sin(y))

    def fails(ctx, y):
        lowered.append(y)
        raise TypeError("another signature")

    failing = Primitive("failing")
    failing.def_abstract_eval(lambda y: y)
    mlir.register_lowering(failing, fails)
    monkeypatch.setattr(Stub, "forward", lambda self, operands, spec: Results(y=unfinished(X)))
    monkeypatch.setattr(backends, "_PREFERRED", preferred)
    stub(HERE)
    for f in (jaxnorm.softmax, jax.jit(jaxnorm.softmax), jax.jit(lambda x: jaxnorm.softmax(x))):
        np.testing.assert_array_equal(f(X), jaxnorm.softmax(X, implementation="xla"))
    assert len(lowered) == len(caplog.records) == 1
    with pytest.raises(ValueError, match=r"implementation='stub': its .* another signature"):
        jaxnorm.softmax(X, implementation="stub")


@pytest.mark.parametrize(
    ("capability", "fails", "preferred", "told"),
    [
        ("9.0", ["mosaic"], None, "mosaic"),
        ("10.0", ["mosaic", "triton"], None, "triton"),
        ("8.0", ["triton"], None, "triton"),
        ("8.9", ["mosaic", "triton"], None, "triton"),
        ("12.0", ["triton"], None, "triton"),
        ("9.0", ["triton"], "triton", "triton"),
        ("9.0", ["triton"], None, None),  # Triton is not needed on this GPU.
        ("8.0", ["mosaic"], None, None),
        ("7.0", ["mosaic", "triton"], None, None),  # This GPU has no kernels.
        ("9.0", ["mosaic"], "xla", None),
        (None, ["mosaic", "triton"], None, None),  # without a GPU, for another machine
    ],
    ids=map(str, range(11)),
)
def test_a_gpu_whose_kernels_cannot_be_imported_is_told_once(
    capability, fails, preferred, told, broken, monkeypatch, caplog
):
    for name in ("mosaic", "triton"):
        if name in fails:
            broken(name)
        else:
            monkeypatch.setitem(backends.MODULES, name, "jaxnorm_kernels_stub")
    monkeypatch.setitem(sys.modules, "jaxnorm_kernels_stub", Stub("jaxnorm_kernels_stub"))
    monkeypatch.setattr(backends, "_PREFERRED", preferred)
    number = capability and round(10 * float(capability))
    monkeypatch.setattr(launching, "local_capability", lambda: number)
    for cols in (7, 8):  # the stand-in is not the default for 7 columns
        jaxnorm.implementation_for("rms_norm", (4, cols), "float32", platform="cuda")
    jaxnorm.implementation_for("rms_norm", (4, 8), "float32", platform="cpu")
    assert len(caplog.records) == (told is not None)
    if told is not None:
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("jaxnorm", "WARNING")
        why = f"the default on this GPU (compute capability {capability})"
        if preferred is not None:
            why = "asked for by JAXNORM_IMPLEMENTATION"
        assert record.getMessage().startswith(
            f"jaxnorm: implementation '{told}', {why}, never runs here: it cannot be imported: no "
            "such thing; python -m jaxnorm prints what runs in its place; "
        )


def test_which_gpus_have_which_kernels_by_default(monkeypatch):
    """`_DEFAULT_ON["mosaic"]` returns True for exactly the GPUs on which Mosaic is the default.

    If kernels cannot be imported, jaxnorm uses `_DEFAULT_ON` to decide whether to log a warning.
    """
    spec = build_spec("softmax", "fwd", 8192, 4096, *[np.dtype("float32")] * 2)
    for capability in (70, 75, 80, 86, 89, 90, 100, 103, 120):
        monkeypatch.setattr(support, "local_capability", lambda c=capability: c)
        takes = support.why_unsupported(spec) is None and support.why_not_default(spec) is None
        assert takes == backends._DEFAULT_ON["mosaic"](capability)


def test_the_environment_is_read_at_import(monkeypatch):
    for value, name in {"xla": "xla", "": None}.items():
        monkeypatch.setenv("JAXNORM_IMPLEMENTATION", value)
        assert backends._from_environment() == name
    done = subprocess.run(
        [sys.executable, "-c", "import jaxnorm"],
        env=os.environ | {"JAXNORM_IMPLEMENTATION": "cudnn"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.endswith(
        "ValueError: jaxnorm: the environment has JAXNORM_IMPLEMENTATION='cudnn'; expected one of "
        "'xla', 'mosaic', 'triton'; unset it to let jaxnorm choose\n"
    )


def test_implementation_for_checks_its_arguments():
    with pytest.raises(ValueError, match="function='gelu'; expected one of 'softmax'"):
        jaxnorm.implementation_for("gelu", (4, 8), "float32")
    with pytest.raises(ValueError, match="platform='gpu'; expected one of 'cpu', 'cuda'"):
        jaxnorm.implementation_for("softmax", (4, 8), "float32", platform="gpu")
    with pytest.raises(TypeError, match="dtype=int32"):
        jaxnorm.implementation_for("softmax", (4, 8), "int32")
    with pytest.raises(ValueError, match=r"^softmax: axis=2 is out of range"):
        jaxnorm.implementation_for("softmax", (4, 8), "float32", axis=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        jaxnorm.implementation_for("rms_norm", (4, 8), "float32", causal=True)
    scale = jax.ShapeDtypeStruct((7,), jnp.float32)
    with pytest.raises(ValueError, match=r"^rms_norm: scale has shape"):
        jaxnorm.implementation_for("rms_norm", (4, 8), "float32", scale=scale)
    for name in ("softmax", "rms_norm_linear"):  # these functions themselves raise the error
        with pytest.raises(ValueError, match=f"^{name}: implementation='mosaic' cannot run on tpu"):
            jaxnorm.implementation_for(
                name, (8192, 4096), "bfloat16", implementation="mosaic", platform="tpu"
            )
    for shape in (8, (-1, 8), (2.0, 8), (None, 8)):
        message = f"^implementation_for: shape={re.escape(repr(shape))}; expected a tuple of sizes"
        with pytest.raises(TypeError, match=message):
            jaxnorm.implementation_for("softmax", shape, "float32")


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("gpu", "9.0", 90),
        ("gpu", "8.6", 86),
        ("gpu", "10.0", 100),
        ("gpu", "8.0 9.0", 80),
        ("gpu", "gfx942", None),
        ("cpu", "", None),
    ],
)
def test_the_default_knows_the_gpu(platform, capability, expected, monkeypatch):
    """Mosaic is the default on GPUs of compute capability 9.0, and if the capability is unknown.

    Of several GPUs, the least capability counts.
    """
    device = functools.partial(types.SimpleNamespace, platform=platform)
    devices = [device(compute_capability=one) for one in capability.split()] or [device()]
    with monkeypatch.context() as patch:
        patch.setattr(launching.jax, "local_devices", lambda: devices)
        launching.local_capability.cache_clear()
        assert launching.local_capability() == expected
    # The capability is cached, so the following calls do not query a device.
    plan = jaxnorm.implementation_for("rms_norm", (4096, 1024), "bfloat16", platform="cuda")
    launching.local_capability.cache_clear()
    assert (plan.forward.name == "mosaic") == (expected in (90, None))
