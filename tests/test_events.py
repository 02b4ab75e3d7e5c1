"""Events, their table, and the vocabulary they are told in."""

import csv
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuraldbg import EventType, FailureMode, SemanticEvent
from neuraldbg.event_table import EVENT_COLUMNS, build_event_table, events_from_table
from neuraldbg.failure_modes import catalogue
from neuraldbg.series import COLUMNS, build_series, empty_series
from neuraldbg.wording import describe_event

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def semantic_events(draw: st.DrawFn) -> SemanticEvent:
    layer = draw(st.none() | st.text(min_size=1, max_size=8))
    start = draw(st.integers(0, 40))
    return SemanticEvent(
        event_id=draw(st.integers(0, 99)),
        event_type=draw(st.sampled_from(list(EventType))),
        layer=layer,
        layer_index=-1 if layer is None else draw(st.integers(0, 9)),
        step_start=start,
        step_end=start + draw(st.integers(0, 40)),
        from_state="before",
        to_state=draw(st.sampled_from(["dead", "huge", "flat"])),
        severity=draw(st.floats(0, 1, width=32)),
        value=draw(finite),
        threshold=draw(finite),
        rank=draw(st.integers(0, 3)),
    )


@given(st.lists(semantic_events(), max_size=12))
def test_a_table_gives_back_its_events_in_causal_order(events: list[SemanticEvent]) -> None:
    found = events_from_table(build_event_table(events))
    assert [event.event_id for event in found] == list(range(len(events)))
    assert [event.moment for event in found] == sorted(event.moment for event in events)
    as_set = {(e.event_type, e.layer, e.step_start, e.step_end, e.value) for e in found}
    assert as_set == {(e.event_type, e.layer, e.step_start, e.step_end, e.value) for e in events}


def test_the_table_has_the_columns_of_the_contract_also_when_empty() -> None:
    assert list(build_event_table([]).columns) == list(EVENT_COLUMNS)
    assert list(EVENT_COLUMNS) == [
        "event_id", "event_type", "layer", "layer_index", "step_start", "step_end", "from_state",
        "to_state", "severity", "value", "threshold", "rank",
    ]  # fmt: skip


def test_a_table_that_lacks_a_column_is_refused_by_name() -> None:
    table = build_event_table([]).drop(columns=["severity", "rank"])
    with pytest.raises(ValueError, match="severity, rank"):
        events_from_table(table)


def test_gradient_events_count_layers_from_the_loss_backwards() -> None:
    def event(kind: EventType, index: int) -> SemanticEvent:
        return SemanticEvent(0, kind, str(index), index, 3, 3, "a", "b", 1.0, 1.0, 1.0)

    forward = [event(EventType.ACTIVATION_DEAD, index) for index in (0, 4)]
    backward = [event(EventType.GRADIENT_VANISHING, index) for index in (0, 4)]
    ordered = sorted([*backward, *forward], key=lambda e: e.moment)
    assert [(e.event_type.value, e.layer_index) for e in ordered] == [
        ("activation_dead", 0),
        ("activation_dead", 4),
        ("gradient_vanishing", 4),
        ("gradient_vanishing", 0),
    ]


@pytest.mark.parametrize("kind", EventType)
def test_every_type_of_event_has_words(kind: EventType) -> None:
    event = SemanticEvent(0, kind, "block.fc", 1, 7, 9, "a", "b", 1.0, 0.25, 0.1)
    assert describe_event(event).startswith("step 7: ")


def test_the_failure_modes_are_those_of_the_catalogue() -> None:
    path = Path(__file__).parents[1] / "neuraldbg" / "failure_modes.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row["id"] for row in csv.DictReader(file)]
    assert [mode.value for mode in FailureMode if mode.is_root_cause] == rows
    assert set(catalogue()) == set(FailureMode)
    for facts in catalogue().values():
        assert facts.title
        assert facts.remedy


def test_a_series_refuses_columns_outside_the_schema() -> None:
    with pytest.raises(ValueError, match="no such series columns: mood"):
        build_series({"mood": [1]})
    with pytest.raises(ValueError, match="needs the key columns rank, layer_index"):
        build_series({"step": [0], "layer": ["fc"], "kind": ["loss"]})
    assert list(empty_series().columns) == list(COLUMNS)
    assert isinstance(empty_series()["layer"].dtype, pd.CategoricalDtype)
