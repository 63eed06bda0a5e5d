"""The examples in docstrings: every public function and class has one, and it runs as printed."""

import doctest
import inspect

import pytest

import jaxnorm
import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

MODULES = [jaxnorm, jaxnorm.linen, jaxnorm.nnx, jaxnorm.equinox]
# Classes whose objects are returned by functions of the library. Users do not construct them, so
# their docstrings have no example.
RESULTS = {
    *("jaxnorm.Choice", "jaxnorm.MemoryReport", "jaxnorm.NormReport", "jaxnorm.ParamReport"),
    *("jaxnorm.Plan", "jaxnorm.RematPlan", "jaxnorm.RematPoint"),
}
# `save_policy` is not called by users but passed to JAX, so docs/transformations.md has its example
# instead.
VALUES = {"jaxnorm.save_policy"}
PUBLIC = {f"{module.__name__}.{name}": module for module in MODULES for name in module.__all__}


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - RESULTS - VALUES))
def test_the_example_runs(name):
    """The example of a public function or class runs by itself and prints something."""
    public = getattr(PUBLIC[name], name.rpartition(".")[2])
    text = inspect.getdoc(public)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert any(line.want for line in example.examples), f"{name} has no example"
    said: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=said.append)
    assert not outcome.failed, "".join(said)
