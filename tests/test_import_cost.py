"""What each import brings along: the libraries that take seconds wait until they are needed."""

import json
import subprocess
import sys

import pytest

REPORT = "import json, sys; print(json.dumps(sorted(sys.modules)))"
EXPLAINING = ("pgmpy", "sklearn", "statsmodels", "matplotlib")
CAPTURING = ("torch", "pandas", "networkx", "scipy")


def modules_after(statement: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{statement}; {REPORT}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(run.stdout))


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import neuraldbg", EXPLAINING + CAPTURING),
        ("import neuraldbg.cli", (*EXPLAINING, "torch")),
        ("from neuraldbg import NeuralDbg", EXPLAINING),
        ("import neuraldbg.capture", EXPLAINING),
        ("import neuraldbg.models", (*EXPLAINING, "torch")),
    ],
)
def test_imports_leave_out_what_they_do_not_need(statement: str, heavy: tuple[str, ...]) -> None:
    assert modules_after(statement).isdisjoint(heavy)
