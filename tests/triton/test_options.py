"""Every field that a Triton kernel reads from a compile-time parameter exists.

The compile-time parameters of a kernel are records. Type checkers do not check kernels, so without
this test a renamed field would only be found when a kernel is compiled. This test needs no Triton.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxnorm_kernels

FOLDER = Path(jaxnorm_kernels.__path__[0], "triton")
MODULES = {path.name: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}


def fields_of(node: ast.ClassDef) -> set[str]:
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
    return fields | {n.name for n in node.body if isinstance(n, ast.FunctionDef)}


CLASSES = {
    node.name: fields_of(node)
    for module in MODULES.values()
    for node in ast.walk(module)
    if isinstance(node, ast.ClassDef)
}


def kernels(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            assert isinstance(node, ast.FunctionDef)
            yield node


def options_read(kernel: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the attributes of compile-time parameters that a kernel reads.

    A compile-time parameter is an argument of the kernel's Python function whose annotation is
    `constexpr`. If the kernel reads ``parameter.attribute``, this function yields the two names
    ``("parameter", "attribute")``.
    """
    parameters = {
        a.arg
        for a in (*kernel.args.args, *kernel.args.kwonlyargs)
        if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
    }
    for node in ast.walk(kernel):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in parameters:
            yield ast.unparse(node.value), node.attr


READ = [
    (name, kernel.name, *option)
    for name, module in MODULES.items()
    for kernel in kernels(module)
    for option in options_read(kernel)
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in READ}))
def test_kernels_read_options_that_there_are(name: str) -> None:
    """Every attribute that a kernel reads from one of its parameters exists.

    The name of a parameter gives its class: the parameter `norm` is an object of the class `Norm`.
    """
    for kernel, parameter, attribute in [rest for module, *rest in READ if module == name]:
        assert attribute in CLASSES[parameter.capitalize()], (kernel, parameter, attribute)


def test_the_kernels_of_norms_are_seen() -> None:
    assert {parameter for _, _, parameter, _ in READ} >= {"norm", "tiling", "logits", "options"}
