"""From the events and the series of one run to the states of the network's observed nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from neuraldbg.event_table import events_from_table
from neuraldbg.events import SemanticEvent
from neuraldbg.models.specification import Observation, Specification, State
from neuraldbg.series import FLAGS, STATISTICS, Kind

Evidence = Mapping[str, str]
"""Observation to state. What could not be observed is missing: it is no key here."""


def read_evidence(
    events: pd.DataFrame, series: pd.DataFrame | Observed, specification: Specification
) -> dict[str, str]:
    """The state of every observation that the run allows to be observed.

    Args:
        events: The event table.
        series: The series table, which tells what was observed at all, or just that.
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
        {'loss_values': 'finite', 'output_domain': 'suitable', 'reduction_axis': 'right', \
'loss_shapes': 'equal', 'defined_operations': 'defined'}
    """
    records = events_from_table(events)
    observed = series if isinstance(series, Observed) else Observed.of(series)
    evidence = {
        observation.name: _state_of(observation, records, observed).name
        for observation in specification.observations
        if observed.steps(observation) >= observation.frames
    }
    # A loss that rose for good or turned NaN is no test of whether it would have fallen.
    ran_away = evidence.get("loss_turn") in ("rising", "diverging")
    if ran_away or evidence.get("loss_values") == "non_finite":
        evidence.pop("loss_progress", None)
    return evidence


def matching_events(state: State, events: Iterable[SemanticEvent]) -> list[SemanticEvent]:
    """Those of some events that show a state of an observation."""
    return [
        event
        for event in events
        if event.event_type in state.event_types
        and state.to_state in ("", event.to_state)
        and (not state.onset or (event.step_start == 0) == (state.onset == "start"))
    ]


def _state_of(
    observation: Observation, events: Sequence[SemanticEvent], observed: Observed
) -> State:
    """The last state whose events are there, else the first."""
    found = observation.states[0]
    for state in observation.states[1:]:
        matching = matching_events(state, events)
        layers = {event.layer for event in matching}
        if matching and len(layers) >= state.share * observed.layers(observation):
            found = state
    return found


@dataclass(frozen=True, slots=True)
class Observed:
    """Of what a run's series holds values: at how many steps, and in how many layers.

    Attributes:
        counts: (kind, column) to (steps, layers); what was never observed is missing.

    Example:
        >>> Observed({("loss", "value"): (50, 1)}).counts["loss", "value"]
        (50, 1)
    """

    counts: Mapping[tuple[str, str], tuple[int, int]]

    @classmethod
    def of(cls, series: pd.DataFrame) -> Observed:
        """What a series table holds.

        Rows of evaluations count for the one column that they alone have, whether their loss is
        the same quantity as the training loss; for all others those of the training count.
        """
        evaluated = series["evaluation"].fillna(0.0) != 0.0
        columns = [*STATISTICS, *FLAGS]
        counts = {}
        for kind, rows in series[~evaluated].groupby("kind", observed=True):
            steps, layers = rows["step"].to_numpy(), rows["layer"].cat.codes.to_numpy()
            known = rows[columns].notna().to_numpy()
            for position in np.flatnonzero(known.any(axis=0)):
                there = known[:, position]
                counts[str(kind), columns[position]] = _distinct(steps[there], layers[there])
        compared = series[evaluated & (series["comparable"] == 1.0)]
        if len(compared):
            steps, layers = compared["step"].to_numpy(), compared["layer"].cat.codes.to_numpy()
            counts[Kind.LOSS.value, "comparable"] = _distinct(steps, layers)
        return cls(counts)

    def steps(self, observation: Observation) -> int:
        """At how many steps what an observation needs was observed."""
        return self._count(observation)[0]

    def layers(self, observation: Observation) -> int:
        """In how many layers."""
        return self._count(observation)[1]

    def _count(self, observation: Observation) -> tuple[int, int]:
        return self.counts.get((observation.kind.value, observation.column), (0, 0))


def _distinct(steps: np.ndarray, layers: np.ndarray) -> tuple[int, int]:
    return len(np.unique(steps)), len(np.unique(layers))
