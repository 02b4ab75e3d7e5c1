"""From the series and the events of a run, watched or stored, to the explanation of its failure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING

import pandas as pd

from neuraldbg.causal_chain import build_causal_graph, trace_causal_chain
from neuraldbg.event_table import events_from_table
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.explanations import Explanations
from neuraldbg.failure_modes import FailureMode
from neuraldbg.hypotheses import RootCause
from neuraldbg.mermaid import causal_graph_to_mermaid
from neuraldbg.ranking import Support, rank_hypotheses
from neuraldbg.thresholds import Thresholds

if TYPE_CHECKING:
    from neuraldbg.models import FailureNetwork
    from neuraldbg.models.evidence import Observed


def diagnose(
    series: pd.DataFrame | Observed,
    events: pd.DataFrame,
    steps: int,
    thresholds: Thresholds,
    network: FailureNetwork,
) -> Explanations:
    """Ranked hypotheses about a run, most probable first.

    Args:
        series: The run's series table (`neuraldbg.series`), or just what it held.
        events: Its event table (`neuraldbg.event_table`).
        steps: Steps the run had.
        thresholds: Within how many steps events may be cause and effect.
        network: The Bayesian network to reason with.

    Example:
        >>> from neuraldbg.event_table import build_event_table
        >>> from neuraldbg.series import build_series
        >>> series = build_series({"step": [0], "rank": [0], "layer": [None], "layer_index": [-1],
        ...                        "kind": ["loss"], "value": [2.3], "nonfinite_fraction": [0]})
        >>> found = diagnose(series, build_event_table([]), 1, Thresholds(), shipped_network())
        >>> found[0].cause.value
        'healthy'
    """
    records = events_from_table(events)
    evidence = network.read_evidence(events, series)
    posterior = network.posterior(evidence)
    supports = {cause: _support(network, cause, evidence, records) for cause in posterior.causes}
    graph = build_causal_graph(records, thresholds)
    return Explanations(rank_hypotheses(posterior.ranked(), supports, graph), steps=steps)


def _support(
    network: FailureNetwork,
    cause: FailureMode,
    evidence: dict[str, str],
    events: list[SemanticEvent],
) -> Support:
    findings = network.findings(cause, evidence)
    behind = {f.observation: network.events_behind(f, events) for f in findings}
    return Support(findings, behind)


@cache
def shipped_network() -> FailureNetwork:
    """The network that is reasoned with where none is given.

    Importing pgmpy takes seconds: only a run that is to be explained pays for it.
    """
    from neuraldbg.models import default_network

    return default_network()


class Diagnosable(ABC):
    """A run that can be asked why it failed: one being watched, or one that was stored."""

    thresholds: Thresholds
    _network: FailureNetwork | None

    @property
    @abstractmethod
    def series(self) -> pd.DataFrame:
        """Statistics over steps: one row per step, rank, layer and kind."""

    @property
    @abstractmethod
    def events(self) -> pd.DataFrame:
        """The event table: one row per labelled span, in causal order."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the run so far."""

    def explain_failure(self) -> Explanations:
        """Ranked hypotheses about the run, most probable first, ``healthy`` and ``unknown`` too.

        Works on an unfinished run as well, on what has been seen of it so far.
        """
        network = self._network if self._network is not None else shipped_network()
        return diagnose(self.series, self.events, self.steps, self.thresholds, network)

    def get_root_causes(self) -> list[RootCause]:
        """Where each failure first originated: cause, probability, layer and step.

        Empty for a healthy run.
        """
        return self.explain_failure().root_causes()

    def trace_causal_chain(self, event_type: EventType | str) -> tuple[SemanticEvent, ...]:
        """The events that lead to the first event of a type, in causal order.

        Args:
            event_type: An `EventType` or its value.

        Raises:
            ValueError: the value names no event type; the message lists those that exist.
        """
        return trace_causal_chain(events_from_table(self.events), event_type, self.thresholds)

    def export_mermaid_causal_graph(self) -> str:
        """The causal graph over the run's events as a Mermaid flowchart."""
        graph = build_causal_graph(events_from_table(self.events), self.thresholds)
        return causal_graph_to_mermaid(graph)
