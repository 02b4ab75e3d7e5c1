"""Networks on disk: JSON that gives back the same network, and clear errors for anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuraldbg.models import FailureNetwork, NetworkFormatError, default_specification
from neuraldbg.models.network_file import specification_to_json


@pytest.fixture
def document() -> dict[str, Any]:
    return specification_to_json(default_specification())


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_saved_network_is_the_same_network(tmp_path: Path) -> None:
    FailureNetwork().save(tmp_path / "network.json")
    assert FailureNetwork.load(tmp_path / "network.json").specification == default_specification()


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    FailureNetwork().save(tmp_path / "a.json")
    FailureNetwork.load(tmp_path / "a.json").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def damage(document: dict[str, Any], *path: Any, value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "something", "not a network"),
        (("schema_version",), 99, "schema version 99"),
        (("causes", 0, "mode"), "gremlins", "gremlins"),
        (("causes", 0, "mode"), "healthy", "healthy is the absence"),
        (("causes", 0, "prior"), 1.5, "prior of lr_blowup is 1.5"),
        (("causes", 0, "prior"), "high", "could not convert"),
        (("causes", 1, "mode"), "lr_blowup", "'lr_blowup' names two nodes"),
        (("mechanisms", 0, "leak"), 0.0, "leak of oversized_updates is 0.0"),
        (("mechanisms", 0, "strengths"), {"healthy": 0.5}, "healthy, which has no prior"),
        (("mechanisms", 0, "strengths"), [], "wrong type"),
        (("observations", 0, "mechanism"), "magic", "no mechanism 'magic'"),
        (("observations", 0, "column"), "mood", "no column 'mood'"),
        (("observations", 0, "kind"), "mood", "mood"),
        (("observations", 0, "states", 0, "p_present"), 0.9, "p_present of update_excess sums to"),
        (("observations", 0, "states", 1, "event_types"), ["boom"], "'boom' is no event type"),
        (("observations", 0, "states"), [], "needs at least two states"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong_and_where(
    tmp_path: Path, document: dict[str, Any], path: tuple[Any, ...], value: Any, message: str
) -> None:
    damage(document, *path, value=value)
    file = write(tmp_path / "damaged.json", document)
    with pytest.raises(NetworkFormatError, match=message) as error:
        FailureNetwork.load(file)
    assert "damaged.json" in str(error.value)


@pytest.mark.parametrize("key", ["causes", "mechanisms", "observations"])
def test_a_missing_part_is_named(tmp_path: Path, document: dict[str, Any], key: str) -> None:
    del document[key]
    with pytest.raises(NetworkFormatError, match=f"'{key}' is missing"):
        FailureNetwork.load(write(tmp_path / "part.json", document))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\x80\x04pickle")
    with pytest.raises(NetworkFormatError, match=r"x\.json is not a JSON file"):
        FailureNetwork.load(tmp_path / "x.json")


def test_every_number_of_the_shipped_tables_has_a_reason() -> None:
    specification = default_specification()
    assert all(cause.reason for cause in specification.causes)
    for mechanism in specification.mechanisms:
        assert set(mechanism.reasons) == {"", *(mode.value for mode in mechanism.strengths)}
        assert all(mechanism.reasons.values())
    for observation in specification.observations:
        assert all(state.wording and state.reason for state in observation.states)


def test_every_mechanism_is_observed_and_every_cause_acts() -> None:
    specification = default_specification()
    observed = {observation.mechanism for observation in specification.observations}
    assert observed == {mechanism.name for mechanism in specification.mechanisms}
    acting = {mode for mechanism in specification.mechanisms for mode in mechanism.strengths}
    assert acting == {cause.mode for cause in specification.causes}
