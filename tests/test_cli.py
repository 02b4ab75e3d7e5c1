"""The command line."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from neuraldbg import __version__
from neuraldbg.cli import DemoFault, app
from neuraldbg.evaluation.faults import FAULTS

runner = CliRunner()


def test_the_demo_offers_exactly_the_faults_there_are() -> None:
    assert [fault.value for fault in DemoFault] == [mode.value for mode in FAULTS]


def test_help_and_version() -> None:
    assert __version__ in runner.invoke(app, ["--version"]).output
    assert "demo" in runner.invoke(app, ["--help"]).output


def test_the_demo_explains_both_runs_for_machines() -> None:
    result = runner.invoke(app, ["demo", "--fault", "nan_input", "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["fault"] == "nan_input"
    assert [run["hypotheses"][0]["cause"] for run in document["runs"]] == ["healthy", "nan_input"]


def test_the_demo_as_a_module_prints_the_report_of_both_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neuraldbg", "demo", "--fault", "missing_zero_grad"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Nothing is wrong" in done.stdout
    assert "Gradients never reset" in done.stdout
    assert "call optimizer.zero_grad() each step" in done.stdout.replace("\n", " ").replace(
        "  ", ""
    )


def test_an_unknown_fault_is_refused_with_the_choices() -> None:
    result = runner.invoke(app, ["demo", "--fault", "gremlins"])
    assert result.exit_code == 2
    assert "gremlins" in result.output
    assert "lr_blowup" in result.output


def test_the_help_of_the_demo_lists_the_faults() -> None:
    result = runner.invoke(app, ["demo", "--help"], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    assert [fault for fault in DemoFault if fault.value not in result.output] == []
