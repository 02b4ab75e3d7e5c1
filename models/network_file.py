"""Networks as JSON files with a schema version; loading one runs no code of the file's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuraldbg.events import EventType
from neuraldbg.failure_modes import FailureMode
from neuraldbg.models.specification import (
    Cause,
    Mechanism,
    NetworkFormatError,
    Observation,
    Specification,
    State,
)
from neuraldbg.series import Kind

SCHEMA_VERSION = 1
_FORMAT = "neuraldbg-network"


def write_specification(specification: Specification, path: str | Path) -> None:
    """Write a network as JSON, numbers in full so that reading gives exactly the same."""
    text = json.dumps(specification_to_json(specification), indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_specification(path: str | Path) -> Specification:
    """Read and check a network.

    Raises:
        FileNotFoundError: there is no such file.
        NetworkFormatError: it is not JSON, not a network, of another schema version, or not valid
            as a network; the message names the file and what is wrong.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NetworkFormatError(f"{path} is not a JSON file: {error}") from error
    try:
        return specification_from_json(document)
    except NetworkFormatError as error:
        raise NetworkFormatError(f"{path}: {error}") from error


def specification_to_json(specification: Specification) -> dict[str, Any]:
    """A network as plain lists and dictionaries.

    Example:
        >>> from neuraldbg.models.specification import default_specification
        >>> document = specification_to_json(default_specification())
        >>> document["causes"][0]["mode"], document["schema_version"]
        ('lr_blowup', 1)
        >>> specification_from_json(document) == default_specification()
        True
    """
    return {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "causes": [
            {"mode": cause.mode.value, "prior": cause.prior, "reason": cause.reason}
            for cause in specification.causes
        ],
        "mechanisms": [
            {
                "name": mechanism.name,
                "leak": mechanism.leak,
                "strengths": {mode.value: p for mode, p in mechanism.strengths.items()},
                "reasons": dict(mechanism.reasons),
            }
            for mechanism in specification.mechanisms
        ],
        "observations": [
            {
                "name": observation.name,
                "mechanism": observation.mechanism,
                "kind": observation.kind.value,
                "column": observation.column,
                "frames": observation.frames,
                "states": [_state_to_json(state) for state in observation.states],
            }
            for observation in specification.observations
        ],
    }


def specification_from_json(document: Any) -> Specification:
    """A network from what `specification_to_json` gives.

    Raises:
        NetworkFormatError: something is missing, of the wrong type or not valid.
    """
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise NetworkFormatError(f'not a network: it must be an object with "format": "{_FORMAT}"')
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise NetworkFormatError(
            f"schema version {version!r} is not the one this release reads ({SCHEMA_VERSION}); "
            "write the network again with `FailureNetwork.save` of this release"
        )
    try:
        return Specification(
            causes=tuple(
                Cause(FailureMode(row["mode"]), float(row["prior"]), str(row["reason"]))
                for row in document["causes"]
            ),
            mechanisms=tuple(_mechanism_from_json(row) for row in document["mechanisms"]),
            observations=tuple(_observation_from_json(row) for row in document["observations"]),
        )
    except KeyError as error:
        raise NetworkFormatError(f"the entry {error} is missing") from error
    except (TypeError, AttributeError) as error:
        raise NetworkFormatError(f"an entry is of the wrong type: {error}") from error
    except NetworkFormatError:
        raise
    except ValueError as error:
        raise NetworkFormatError(str(error)) from error


def _state_to_json(state: State) -> dict[str, Any]:
    return {
        "name": state.name,
        "event_types": [event_type.value for event_type in state.event_types],
        "to_state": state.to_state,
        "onset": state.onset,
        "share": state.share,
        "p_present": state.p_present,
        "p_absent": state.p_absent,
        "wording": state.wording,
        "reason": state.reason,
    }


def _state_from_json(row: Mapping[str, Any]) -> State:
    return State(
        name=str(row["name"]),
        event_types=tuple(EventType.parse(name) for name in row["event_types"]),
        to_state=str(row["to_state"]),
        onset=str(row["onset"]),
        share=float(row["share"]),
        p_present=float(row["p_present"]),
        p_absent=float(row["p_absent"]),
        wording=str(row["wording"]),
        reason=str(row["reason"]),
    )


def _mechanism_from_json(row: Mapping[str, Any]) -> Mechanism:
    return Mechanism(
        name=str(row["name"]),
        leak=float(row["leak"]),
        strengths={FailureMode(mode): float(p) for mode, p in row["strengths"].items()},
        reasons={str(key): str(reason) for key, reason in row["reasons"].items()},
    )


def _observation_from_json(row: Mapping[str, Any]) -> Observation:
    return Observation(
        name=str(row["name"]),
        mechanism=str(row["mechanism"]),
        states=tuple(_state_from_json(state) for state in row["states"]),
        kind=Kind(row["kind"]),
        column=str(row["column"]),
        frames=int(row["frames"]),
    )
