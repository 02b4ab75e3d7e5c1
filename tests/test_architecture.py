"""Which package may import which, and what an `__init__.py` may hold."""

import ast
from pathlib import Path

import pytest
from source_tree import find_modules, imported_names

MODULES = find_modules()

SPOKES = ("neuraldbg.capture", "neuraldbg.models", "neuraldbg.evaluation")
# What stands above the hub's vocabulary and reasoning, and so is nothing they may lean on.
# The face is three modules: a run that is watched (it needs capture), one read from disk (it needs
# capture to find the events of its series), and what both can be asked (it needs the network).
FACE = ("neuraldbg.debugger", "neuraldbg.stored_run", "neuraldbg.diagnosis")
LAZY = ("neuraldbg.NeuralDbg", "neuraldbg.StoredRun", "neuraldbg.load")
ABOVE = (*FACE, *LAZY, "neuraldbg.cli", "neuraldbg.__main__")
HUB = ("torch", "pgmpy", "sklearn", "typer", *SPOKES, *ABOVE)

# What a module must not import, by the longest prefix of its name that stands here.
BARRED = {
    "neuraldbg": HUB,
    "neuraldbg.debugger": ("pgmpy", "sklearn", "typer", "neuraldbg.evaluation", "neuraldbg.cli"),
    "neuraldbg.stored_run": (
        "torch", "pgmpy", "sklearn", "typer", "neuraldbg.evaluation", "neuraldbg.debugger",
        "neuraldbg.cli",
    ),
    "neuraldbg.diagnosis": (
        "torch", "pgmpy", "sklearn", "typer", "neuraldbg.capture", "neuraldbg.evaluation",
        "neuraldbg.debugger", "neuraldbg.stored_run", "neuraldbg.cli",
    ),
    "neuraldbg.cli": ("torch", "pgmpy", "sklearn"),
    "neuraldbg.__main__": ("torch", "pgmpy", "sklearn", "neuraldbg.evaluation"),
    "neuraldbg.capture": (
        "pgmpy", "sklearn", "typer", "neuraldbg.models", "neuraldbg.evaluation", *ABOVE,
    ),
    "neuraldbg.models": (
        "torch", "sklearn", "typer", "neuraldbg.capture", "neuraldbg.evaluation", *ABOVE,
    ),
    "neuraldbg.evaluation": ("neuraldbg.cli",),
}  # fmt: skip
# For type checkers alone: the lazy face names what it imports on first use.
EXCEPTIONS = {
    ("neuraldbg", name)
    for name in (
        "neuraldbg.debugger",
        "neuraldbg.debugger.NeuralDbg",
        "neuraldbg.stored_run",
        "neuraldbg.stored_run.StoredRun",
        "neuraldbg.stored_run.load",
    )
}


def barred_for(name: str) -> tuple[str, ...]:
    while name not in BARRED:
        name = name.rpartition(".")[0]
    return BARRED[name]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_inwards(name: str) -> None:
    wrong = {
        imported
        for imported in imported_names(name, MODULES[name])
        if any(within(imported, package) for package in barred_for(name))
        and (name, imported) not in EXCEPTIONS
    }
    assert not wrong, f"{name} must not import {sorted(wrong)}"


@pytest.mark.parametrize("folder", ["capture", "models", "evaluation"])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_imported_under_its_folders_name(name: str, folder: str) -> None:
    assert not [found for found in imported_names(name, MODULES[name]) if within(found, folder)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("import_module('torch.nn')", {"torch.nn"}),
        ("importlib.import_module('torch.nn')", {"torch.nn"}),
        ("def f():\n    from pgmpy.models import X", {"pgmpy.models", "pgmpy.models.X"}),
        ("from . import b", {"neuraldbg.models", "neuraldbg.models.b"}),
        ("from .b import c", {"neuraldbg.models.b", "neuraldbg.models.b.c"}),
        ("from ..capture import d", {"neuraldbg.capture", "neuraldbg.capture.d"}),
    ],
)
def test_imports_are_found_and_resolved(tmp_path: Path, source: str, expected: set[str]) -> None:
    for name, file in (("neuraldbg.models.a", "a.py"), ("neuraldbg.models", "__init__.py")):
        path = tmp_path / file
        path.write_text(source, encoding="utf-8")
        assert set(imported_names(name, path)) == expected


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if path.name == "__init__.py"])
def test_an_init_file_only_collects_names(name: str) -> None:
    for node in ast.parse(MODULES[name].read_text(encoding="utf-8")).body:
        assert collects_names(node), f"{name}, line {node.lineno}: this belongs in a module"


def collects_names(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, an import, a literal, a guard or lazy machinery."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            literal = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Load)
            return all(isinstance(part, literal) for part in ast.walk(value))
        case ast.If(test=test, body=body, orelse=[]):
            guarded = ast.unparse(test)
            known = guarded == "TYPE_CHECKING" or guarded.startswith("__name__ ==")
            return known and all(collects_names(inner) for inner in body)
        case ast.FunctionDef(name=name):
            return name in ("__getattr__", "__dir__")
    return False


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8")))
