"""What is installed is what is in the folders, under one top-level name."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from source_tree import PACKAGE_DIRS, PYPROJECT, ROOT, TOP_FOLDERS, find_modules, imported_names

SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
SPOKES = ("capture", "models", "evaluation")


def data_files() -> dict[str, str]:
    """Every file that is no module, by its path in an installed copy, with its package."""
    found = {}
    folders = sorted(PACKAGE_DIRS.items(), key=lambda item: len(item[1]), reverse=True)
    for path in (path for folder in TOP_FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        package, folder = next(i for i in folders if path.is_relative_to(ROOT / i[1]))
        inside = path.relative_to(ROOT / folder).as_posix()
        found[f"{package.replace('.', '/')}/{inside}"] = package
    return found


def test_every_package_on_disk_is_listed() -> None:
    on_disk = {name for name, path in find_modules().items() if path.name == "__init__.py"}
    assert set(SETUPTOOLS["packages"]) == on_disk
    assert {
        name: (ROOT / folder / "__init__.py").is_file() for name, folder in PACKAGE_DIRS.items()
    } == dict.fromkeys(on_disk, True)


def test_every_folder_with_modules_is_a_package() -> None:
    assert not [p for p in find_modules().values() if not (p.parent / "__init__.py").is_file()]


def test_every_data_file_is_listed() -> None:
    patterns = SETUPTOOLS["package-data"]
    missing = [
        path
        for path, package in data_files().items()
        if not any(
            fnmatch(path.removeprefix(f"{package.replace('.', '/')}/"), pattern)
            for pattern in patterns.get(package, [])
        )
    ]
    assert not missing


def test_every_imported_library_is_declared() -> None:
    declared = {
        re.split(r"[<>=\[ ]", requirement)[0]
        for requirement in (
            *PYPROJECT["project"]["dependencies"],
            *PYPROJECT["project"]["optional-dependencies"]["evaluation"],
        )
    }
    distributions = packages_distributions()
    used = {
        distribution
        for name, path in find_modules().items()
        for top in {imported.partition(".")[0] for imported in imported_names(name, path)}
        - {"neuraldbg", *sys.stdlib_module_names}
        for distribution in distributions.get(top, [top])
    }
    assert used == declared


@pytest.mark.parametrize("name", SPOKES)
def test_import_by_a_folders_name_fails_with_the_right_one(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert f"neuraldbg.{name}" in last_line


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is built from a copy without old build folders."""
    source = tmp_path_factory.mktemp("source")
    for folder in TOP_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", source], check=True, capture_output=True
    )
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_file_and_no_other(wheel: Path) -> None:
    modules = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in find_modules().items()
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if ".dist-info/" not in name} == modules | set(data_files())


def test_the_wheel_lives_beside_a_users_folders_of_the_same_names(
    wheel: Path, tmp_path: Path
) -> None:
    installed, project = tmp_path / "installed", tmp_path / "project"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", installed, wheel], check=True, capture_output=True)
    assert {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")} <= {
        "neuraldbg",
        "bin",
    }
    for name in SPOKES:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("OWNER = 'user'\n", encoding="utf-8")

    program = f"""
import importlib, json, sys
for name in {SPOKES!r}:
    assert importlib.import_module(name).OWNER == "user"
for name in {sorted(find_modules())!r}:
    importlib.import_module(name)
from neuraldbg.failure_modes import catalogue
from neuraldbg.models import default_specification
catalogue(), default_specification()
ours = {{name: module.__file__ for name, module in sys.modules.items()
        if name.partition(".")[0] == "neuraldbg"}}
print(json.dumps(ours))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded = json.loads(run.stdout)
    assert set(loaded) >= set(find_modules())
    # An editable install of this checkout must not have stepped in for a missing module.
    assert [f for f in loaded.values() if not Path(f).is_relative_to(installed)] == []
