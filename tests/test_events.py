"""Events, their table, and the vocabulary they are told in."""

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuraldbg import EventType, SemanticEvent
from neuraldbg.event_table import EVENT_COLUMNS, build_event_table, events_from_table
from neuraldbg.series import COLUMNS, KEYS, build_series, empty_series
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
    expected = sorted(events, key=lambda event: event.moment)
    assert [replace(event, event_id=0) for event in found] == [
        replace(event, event_id=0) for event in expected
    ]


def test_a_type_is_read_from_its_member_and_its_value() -> None:
    for member in EventType:
        assert EventType.parse(member) is EventType.parse(member.value) is member


def test_an_unknown_type_is_refused_with_all_choices() -> None:
    with pytest.raises(ValueError, match="'gradient_vanished' is no event type") as refusal:
        EventType.parse("gradient_vanished")
    assert all(member.value in str(refusal.value) for member in EventType)


def test_within_a_step_data_come_before_loss_before_gradients_before_updates() -> None:
    in_order = [
        EventType.WEIGHTS_LARGE_AT_START, EventType.INPUT_NON_FINITE,
        EventType.ACTIVATION_NON_FINITE, EventType.LOSS_NON_FINITE, EventType.GRADIENT_NON_FINITE,
        EventType.UPDATE_TOO_LARGE, EventType.WEIGHTS_NON_FINITE,
    ]  # fmt: skip
    assert sorted(in_order, key=lambda kind: kind.phase) == in_order
    assert len({kind.phase for kind in EventType}) == len(EventType)


def test_the_table_has_the_columns_of_the_contract_also_when_empty() -> None:
    assert list(build_event_table([]).columns) == list(EVENT_COLUMNS)
    assert list(EVENT_COLUMNS) == [
        "event_id", "event_type", "layer", "layer_index", "step_start", "step_end", "from_state",
        "to_state", "severity", "value", "threshold", "rank", "detail",
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


def test_a_series_refuses_columns_outside_the_schema() -> None:
    with pytest.raises(ValueError, match="no such series columns: mood"):
        build_series({"mood": [1]})
    with pytest.raises(ValueError, match="needs the key columns rank, layer_index"):
        build_series({"step": [0], "layer": ["fc"], "kind": ["loss"]})
    assert list(empty_series().columns) == list(COLUMNS)
    assert isinstance(empty_series()["layer"].dtype, pd.CategoricalDtype)


def test_a_series_keeps_its_numbers_and_leaves_the_rest_unknown() -> None:
    table = build_series(
        {"step": [3], "rank": [0], "layer": ["fc"], "layer_index": [1], "kind": ["output"],
         "zero_fraction": [0.25]}
    )  # fmt: skip
    assert (table["step"][0], table["layer"][0], table["kind"][0]) == (3, "fc", "output")
    assert table["zero_fraction"][0] == 0.25
    assert table.drop(columns=[*KEYS, "zero_fraction"]).isna().all(axis=None)
