"""Every field that a Triton kernel reads from a compile-time parameter exists.

The compile-time parameters of a kernel are records. Type checkers do not check kernels, so without
this test a renamed field would only be found when a kernel is compiled. This test needs no Triton.
"""

import ast
from pathlib import Path

import pytest

import jaxnorm_kernels

FOLDER = Path(jaxnorm_kernels.__path__[0], "triton")
MODULES = {path.name: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}


def nodes_of(kind, tree):
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


#: Maps the name of each class to the names of its fields and properties.
CLASSES = {
    node.name: {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
    | {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    for module in MODULES.values()
    for node in nodes_of(ast.ClassDef, module)
}


def fields_read(kernel):
    """Return pairs (parameter, field) that a kernel reads from its compile-time parameters."""
    arguments = (*kernel.args.args, *kernel.args.kwonlyargs)
    constants = {a.arg for a in arguments if a.annotation and "constexpr" in ast.unparse(a)}
    found = [(ast.unparse(node.value), node.attr) for node in nodes_of(ast.Attribute, kernel)]
    return [(parameter, field) for parameter, field in found if parameter in constants]


READ = {
    f"{name}:{kernel.name}": fields
    for name, module in MODULES.items()
    for kernel in nodes_of(ast.FunctionDef, module)
    if "triton.jit" in map(ast.unparse, kernel.decorator_list)
    if (fields := fields_read(kernel))
}


@pytest.mark.parametrize("kernel", READ)
def test_kernels_read_options_that_there_are(kernel):
    """The name of a parameter gives its class: the parameter `norm` is an object of `Norm`."""
    for parameter, field in READ[kernel]:
        assert field in CLASSES[parameter.capitalize()], (parameter, field)


def test_the_kernels_are_seen():
    seen = {parameter for fields in READ.values() for parameter, _ in fields}
    assert seen >= {"norm", "tiling", "logits", "options"}
