"""The project's packages and modules, as its pyproject.toml and its folders have them."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIRS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
TOP_FOLDERS = ("neuraldbg", "capture", "models", "evaluation")


def find_modules() -> dict[str, Path]:
    """Every module on disk by the name it is imported as; a package is its `__init__.py`."""
    return {
        _module_name(path): path
        for folder in TOP_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "neuraldbg":
        parts.insert(0, "neuraldbg")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imported_names(name: str, path: Path) -> Iterator[str]:
    """Everything a module imports, wherever in it, relative imports resolved.

    `from a import b` gives both `a` and `a.b`: `b` may be a module.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                home = ".".join([*parents, *filter(None, [home])])
            yield home
            yield from (f"{home}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
