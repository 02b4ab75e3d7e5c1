"""Events and series become states of the observed nodes; what was not observed is missing."""

import pandas as pd
import pytest

from neuraldbg.event_table import build_event_table
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.models import default_specification, read_evidence
from neuraldbg.series import build_series, empty_series


def event(event_type: EventType, to_state: str, layer: str | None = "fc", start: int = 0):
    return SemanticEvent(0, event_type, layer, 0, start, start, "before", to_state, 1.0, 1.0, 1.0)


def series_of(steps: int, layers: tuple[str, ...] = ("fc",), **columns: float) -> pd.DataFrame:
    """Rows of every kind for every layer and step, all with the given numbers; evaluations too."""
    kinds = ("input", "output", "gradient", "parameter", "update", "loss", "optimizer")
    rows = [(step, kind, layer) for step in range(steps) for kind in kinds for layer in layers]
    trained = len(rows)
    rows += [(step, "loss", layer) for step in range(steps) for layer in layers]
    return build_series(
        {
            "step": [step for step, _, _ in rows],
            "rank": [0] * len(rows),
            "layer": [layer for _, _, layer in rows],
            "layer_index": [layers.index(layer) for _, _, layer in rows],
            "kind": [kind for _, kind, _ in rows],
            "evaluation": [0.0] * trained + [1.0] * (len(rows) - trained),
            **{name: [value] * len(rows) for name, value in columns.items()},
        }
    )


EVERYTHING = {
    "value": 1.0, "rms": 1.0, **{o.column: 1.0 for o in default_specification().observations}
}  # fmt: skip


def test_nothing_seen_is_no_evidence() -> None:
    assert read_evidence(build_event_table([]), empty_series(), default_specification()) == {}


def test_a_run_without_events_shows_the_first_state_everywhere() -> None:
    specification = default_specification()
    evidence = read_evidence(build_event_table([]), series_of(60, **EVERYTHING), specification)
    assert evidence == {o.name: o.states[0].name for o in specification.observations}


@pytest.mark.parametrize("observation", default_specification().observations, ids=lambda o: o.name)
def test_what_the_series_does_not_hold_is_missing(observation) -> None:
    columns = {name: value for name, value in EVERYTHING.items() if name != observation.column}
    evidence = read_evidence(
        build_event_table([]), series_of(60, **columns), default_specification()
    )
    assert observation.name not in evidence


def test_a_short_run_cannot_show_that_the_loss_is_flat() -> None:
    evidence = read_evidence(
        build_event_table([]), series_of(10, **EVERYTHING), default_specification()
    )
    assert "loss_progress" not in evidence
    assert evidence["loss_values"] == "finite"


@pytest.mark.parametrize("observation", default_specification().observations, ids=lambda o: o.name)
def test_each_state_is_shown_by_its_events(observation) -> None:
    for state in observation.states[1:]:
        start = 7 if state.onset == "later" else 0
        events = [event(state.event_types[0], state.to_state or "any", start=start)]
        evidence = read_evidence(
            build_event_table(events), series_of(60, **EVERYTHING), default_specification()
        )
        assert evidence[observation.name] == state.name


def test_dead_units_count_by_when_they_died() -> None:
    specification, series = default_specification(), series_of(60, **EVERYTHING)
    born = read_evidence(
        build_event_table([event(EventType.ACTIVATION_DEAD, "dead")]), series, specification
    )
    died = read_evidence(
        build_event_table([event(EventType.ACTIVATION_DEAD, "dead", start=5)]),
        series,
        specification,
    )
    assert (born["units_at_start"], born["units_later"]) == ("dead", "alive")
    assert (died["units_at_start"], died["units_later"]) == ("alive", "dead")


def test_one_small_layer_among_many_is_no_collapse() -> None:
    series = series_of(60, layers=("a", "b", "c", "d"), **EVERYTHING)
    small = [event(EventType.WEIGHTS_SMALL_AT_START, "collapsed", layer) for layer in "abc"]
    specification = default_specification()
    assert read_evidence(build_event_table(small[:1]), series, specification)["weights_low"] == (
        "ordinary"
    )
    assert read_evidence(build_event_table(small), series, specification)["weights_low"] == (
        "collapsed"
    )


def test_a_loss_that_ran_away_says_nothing_of_progress() -> None:
    evidence = read_evidence(
        build_event_table([event(EventType.LOSS_RISING, "diverging", None)]),
        series_of(60, **EVERYTHING),
        default_specification(),
    )
    assert evidence["loss_turn"] == "diverging"
    assert "loss_progress" not in evidence
