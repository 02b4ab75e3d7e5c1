"""`NeuralDbg`: the face that a training loop is wrapped in."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pandas as pd

from neuraldbg.capture import Budget, Cost, Recorder, Schedule
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
    from torch import nn

    from neuraldbg.models import FailureNetwork


class NeuralDbg:
    """Watches a training loop and explains why it failed.

    Wrap an ordinary loop and ask afterwards (or at any time inside). The loop itself stays as it
    is: steps, loss, learning rate and optimizers are found by the capture. Nothing raises inside
    the loop, and the training's numbers are not touched.

    Args:
        models: One or several modules, or one tuple or list of them.
        thresholds: Limits at which statistics become events.
        overhead: Share of the bare step time that capture may take; it looks as often as that
            allows.
        schedule: Which steps are captured instead, whatever that costs.
        network: The Bayesian network to reason with; the shipped one if left out.

    Raises:
        TypeError: no module was given, or something that is none.
        ValueError: the overhead is not above 0.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with NeuralDbg(model) as dbg:
        ...     for _ in range(60):
        ...         x = torch.randn(16, 3)
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        ...         optimizer.step()
        >>> dbg.explain_failure()[0].cause.value
        'healthy'
    """

    def __init__(
        self,
        *models: nn.Module | Iterable[nn.Module],
        thresholds: Thresholds | None = None,
        overhead: float = 0.02,
        schedule: Schedule | None = None,
        network: FailureNetwork | None = None,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self._recorder = Recorder(
            _modules(models), self.thresholds, schedule or Budget(overhead=overhead)
        )
        self._network = network
        self._events: tuple[int, pd.DataFrame] | None = None
        self._series: tuple[int, pd.DataFrame] | None = None

    def __enter__(self) -> Self:
        self._recorder.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.detach()

    def record(self, **metrics: object) -> None:
        """Keep numbers that only the training script knows: validation loss, accuracy, ...

        Never needed: losses of evaluations are seen by themselves where they are computed by
        PyTorch's loss functions or by the model. A name that says so (``val_loss``,
        ``test_perplexity``) makes a metric the validation loss of the run.

        Args:
            metrics: Each an int, a float, a NumPy scalar, or a tensor or array of one element;
                anything else is left out with a warning.

        Raises:
            RuntimeError: called before the ``with`` began.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with NeuralDbg(model) as dbg:
            ...     model(torch.randn(8, 3)).square().mean().backward()
            ...     optimizer.step()
            ...     dbg.record(val_loss=0.5)
            >>> rows = dbg.series[dbg.series["kind"] == "metric"]
            >>> rows[["step", "layer", "value"]].values.tolist()
            [[1, 'val_loss', 0.5]]
        """
        self._recorder.record(metrics)

    @property
    def series(self) -> pd.DataFrame:
        """Statistics over steps: one row per step, rank, layer and kind."""
        version = self._recorder.log.version
        if self._series is None or self._series[0] != version:
            self._series = (version, self._recorder.series())
        return self._series[1]

    @property
    def events(self) -> pd.DataFrame:
        """The event table: one row per labelled span, in causal order."""
        version = self._recorder.log.version
        if self._events is None or self._events[0] != version:
            self._events = (version, self._recorder.events(self.series))
        return self._events[1]

    @property
    def faults(self) -> list[tuple[int, str]]:
        """Faults of NeuralDBG's own during the run, as (step, message); empty if all went well."""
        return list(self._recorder.guard.faults)

    @property
    def coverage(self) -> pd.DataFrame:
        """What of the run was observed, what was not, and why: one row for each.

        Columns: ``what``, ``layer``, ``observed`` (number of steps), ``of`` (steps at which it
        might have been), ``reason`` (empty where all was observed).
        """
        return self._recorder.coverage(self.series)

    @property
    def cost(self) -> Cost:
        """What capture has cost so far, by its own clock."""
        return self._recorder.cost

    def explain_failure(self) -> Explanations:
        """Ranked hypotheses about the run, most probable first, ``healthy`` and ``unknown`` too.

        Works inside the ``with`` as well, on what has been seen so far.
        """
        network = self._failure_network()
        events = events_from_table(self.events)
        evidence = network.read_evidence(self.events, self.series)
        posterior = network.posterior(evidence)
        supports = {
            cause: self._support(network, cause, evidence, events) for cause in posterior.causes
        }
        graph = build_causal_graph(events, self.thresholds)
        return Explanations(
            rank_hypotheses(posterior.ranked(), supports, graph), steps=self._recorder.steps_seen
        )

    def _support(
        self,
        network: FailureNetwork,
        cause: FailureMode,
        evidence: dict[str, str],
        events: list[SemanticEvent],
    ) -> Support:
        findings = network.findings(cause, evidence)
        behind = {f.observation: network.events_behind(f, events) for f in findings}
        return Support(findings, behind)

    def _failure_network(self) -> FailureNetwork:
        if self._network is None:
            # Importing pgmpy takes seconds: only a run that is to be explained pays for it.
            from neuraldbg.models import default_network

            self._network = default_network()
        return self._network

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


def _modules(given: tuple[object, ...]) -> list[nn.Module]:
    from torch import nn

    if len(given) == 1 and isinstance(given[0], Iterable) and not isinstance(given[0], nn.Module):
        given = tuple(given[0])
    if not given:
        raise TypeError("NeuralDbg needs the model to watch: NeuralDbg(model)")
    for model in given:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"NeuralDbg watches torch.nn.Module objects, not {type(model).__name__}: pass the "
                "model itself, several models, or one tuple of them"
            )
    return [model for model in given if isinstance(model, nn.Module)]
