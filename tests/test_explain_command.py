"""`neuraldbg explain`: the verdict on a stored run, for people and for scripts."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import neuraldbg.stored_run
from neuraldbg import NeuralDbg
from neuraldbg.capture.run_format import part_name
from neuraldbg.capture.run_writer import open_run
from neuraldbg.cli import app
from neuraldbg.series import build_series

runner = CliRunner()


def train(place, rate: float, during=str) -> NeuralDbg:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with NeuralDbg(model, run=place) as dbg:
        for step in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            during(step)
    return dbg


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "healthy"
    return place, train(place, 0.05)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "failing"
    return place, train(place, 50.0)


def explain(*arguments):
    return runner.invoke(app, ["explain", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_healthy_run_has_exit_code_0(healthy) -> None:
    result = explain(healthy[0])
    assert result.exit_code == 0
    assert "Nothing is wrong" in result.stdout
    assert ": finished, last written 20" in result.stdout


def test_a_failure_has_exit_code_1_and_says_what_the_watcher_said(failing) -> None:
    place, watched = failing
    result = explain(place)
    first = watched.explain_failure()[0]
    assert result.exit_code == 1
    assert first.cause.value in result.stdout
    assert first.remedy.split()[0] in result.stdout


def test_a_document_for_scripts_is_strict_json(failing) -> None:
    place, watched = failing
    result = explain(place, "--json")
    assert result.exit_code == 1

    def refuse(constant):
        raise AssertionError(constant)

    document = json.loads(result.stdout, parse_constant=refuse)
    assert document["failed"] is True
    assert (document["state"], document["steps"], document["ranks"]) == ("finished", 60, [0])
    assert document["problems"] == []
    expected = [(h.cause.value, h.probability) for h in watched.explain_failure()]
    assert [(h["cause"], h["probability"]) for h in document["hypotheses"]] == expected


def test_a_run_that_still_goes_on_is_explained(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("neuraldbg.capture.run_writer.FIRST_INTERVAL", 0.0)
    monkeypatch.setattr("neuraldbg.capture.run_writer.LONGEST_INTERVAL", 0.0)
    results = []
    train(tmp_path / "run", 50.0, lambda step: step == 49 and results.append(
        [explain(tmp_path / "run", "--json"), explain(tmp_path / "run")]
    ))  # fmt: skip
    machine, human = results[0]
    document = json.loads(machine.stdout)
    assert (document["state"], document["steps"]) == ("running", 50)
    assert "still running (or killed): 50 steps so far" in human.stdout
    assert machine.exit_code == human.exit_code == 1


def test_a_run_that_was_broken_off_says_so(tmp_path) -> None:
    sink = open_run(tmp_path)
    sink.append(
        build_series(
            {"step": [0, 0], "rank": [0, 0], "layer": [None, None], "layer_index": [-1, -1],
             "kind": ["loss", "optimizer"], "value": [0.5, 0.1]}
        )
    )  # fmt: skip
    sink.close(finished=False)
    assert "broken off after 1 step: the process" in explain(tmp_path).stdout


def test_what_is_no_run_has_exit_code_2_and_says_why(tmp_path) -> None:
    for place, message in (
        (tmp_path / "nowhere", "there is no run at"),
        (tmp_path, "there is no run at"),
        ("nowhere://runs/today", "nowhere"),
    ):
        result = explain(place)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""


def test_a_run_without_steps_is_no_healthy_run(tmp_path) -> None:
    sink = open_run(tmp_path)
    result = explain(tmp_path)
    assert result.exit_code == 2
    assert "holds no steps yet (it is running)" in result.stderr
    sink.close(finished=False)


def test_wrong_use_has_exit_code_2(healthy) -> None:
    assert explain().exit_code == 2
    assert explain(healthy[0], "--xml").exit_code == 2


def test_a_defect_of_its_own_does_not_look_like_a_verdict(healthy, monkeypatch) -> None:
    def fail(run):
        raise RuntimeError("defect")

    monkeypatch.setattr(neuraldbg.stored_run, "load", fail)
    result = explain(healthy[0])
    assert result.exit_code == 2
    assert "defect" in result.stderr


def test_damage_is_told_beside_the_verdict(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("neuraldbg.capture.run_writer.FIRST_INTERVAL", 0.0)
    monkeypatch.setattr("neuraldbg.capture.run_writer.LONGEST_INTERVAL", 0.0)
    run = tmp_path / "run"
    train(run, 0.05, lambda step: step == 40 and (
        (run / "rank-0" / part_name(30)).write_bytes(b"torn")
    ))  # fmt: skip
    result = explain(run, "--json")
    assert "part-000030.arrow is damaged" in result.stderr
    document = json.loads(result.stdout)
    assert len(document["problems"]) == 1


def test_the_exit_code_is_that_of_the_process(failing) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neuraldbg", "explain", str(failing[0]), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["failed"]
    assert done.stderr == ""
