"""The project's packages and modules, as its pyproject.toml and its folders have them."""

import tomllib
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
