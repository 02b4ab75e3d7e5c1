"""From the events and the series of one run to the states of the network's observed nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from neuraldbg.models.specification import Observation, Specification, State

Evidence = Mapping[str, str]
"""Observation to state. What could not be observed is missing: it is no key here."""


def read_evidence(
    events: pd.DataFrame, series: pd.DataFrame, specification: Specification
) -> dict[str, str]:
    """The state of every observation that the run allows to be observed.

    Args:
        events: The event table.
        series: The series table, which tells what was observed at all.
        specification: The network's observations, each with the events that show its states.

    Returns:
        Observation to state; missing evidence has no entry.

    Example:
        >>> from neuraldbg.event_table import build_event_table
        >>> from neuraldbg.models.specification import default_specification
        >>> from neuraldbg.series import build_series
        >>> series = build_series({"step": [0], "rank": [0], "layer": [None], "layer_index": [-1],
        ...                        "kind": ["loss"], "value": [2.3]})
        >>> read_evidence(build_event_table([]), series, default_specification())
        {'loss_values': 'finite'}
    """
    evidence = {}
    observed = _Observed(series)
    for observation in specification.observations:
        if observed.steps(observation) >= observation.frames:
            evidence[observation.name] = _state_of(observation, events, observed).name
    # A loss that rose for good or turned NaN is no test of whether it would have fallen.
    if (
        evidence.get("loss_turn") in ("rising", "diverging")
        or evidence.get("loss_values") == "non_finite"
    ):
        evidence.pop("loss_progress", None)
    return evidence


def matching_events(observation: Observation, state: State, events: pd.DataFrame) -> pd.DataFrame:
    """The rows of the event table that show a state of an observation."""
    names = [event_type.value for event_type in state.event_types]
    rows = events[events["event_type"].isin(names)]
    if state.to_state:
        rows = rows[rows["to_state"] == state.to_state]
    if state.onset:
        rows = rows[(rows["step_start"] == 0) == (state.onset == "start")]
    return rows


def _state_of(observation: Observation, events: pd.DataFrame, observed: _Observed) -> State:
    """The last state whose events are there, else the first."""
    found = observation.states[0]
    for state in observation.states[1:]:
        rows = matching_events(observation, state, events)
        if len(rows) and rows["layer"].nunique() >= state.share * observed.layers(observation):
            found = state
    return found


class _Observed:
    """What a series holds, counted once for each pair of kind and column."""

    def __init__(self, series: pd.DataFrame) -> None:
        self._series = series
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def steps(self, observation: Observation) -> int:
        return self._count(observation)[0]

    def layers(self, observation: Observation) -> int:
        return self._count(observation)[1]

    def _count(self, observation: Observation) -> tuple[int, int]:
        key = (observation.kind.value, observation.column)
        if key not in self._counts:
            rows = self._series[(self._series["kind"] == key[0]) & self._series[key[1]].notna()]
            self._counts[key] = (rows["step"].nunique(), rows["layer"].nunique())
        return self._counts[key]


def describe(evidence: Evidence, specification: Specification) -> Iterator[tuple[str, str]]:
    """Each piece of evidence in words, as (observation, wording)."""
    for name, state in evidence.items():
        yield name, specification.observation(name).state(state).wording
