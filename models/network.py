"""The failure network: specification, pgmpy network and posterior in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from neuraldbg.events import SemanticEvent
from neuraldbg.failure_modes import FailureMode
from neuraldbg.hypotheses import Finding
from neuraldbg.models.evidence import Observed, matching_events, read_evidence
from neuraldbg.models.message_passing import pass_messages
from neuraldbg.models.network_file import read_specification, write_specification
from neuraldbg.models.posterior import Posterior
from neuraldbg.models.specification import Specification, default_specification
from neuraldbg.models.structure import build_network
from neuraldbg.models.support import weigh_evidence

if TYPE_CHECKING:
    from pgmpy.models import DiscreteBayesianNetwork


class FailureNetwork:
    """A Bayesian network over failure modes: causes, mechanisms, observed events.

    Args:
        specification: What it is made of; the shipped network if left out.

    Example:
        >>> network = FailureNetwork()
        >>> posterior = network.posterior({"gradient_reset": "kept", "loss_progress": "flat"})
        >>> cause, probability = posterior.ranked()[0]
        >>> cause.value, round(probability, 2)
        ('missing_zero_grad', 0.9)
    """

    def __init__(self, specification: Specification | None = None) -> None:
        self.specification = specification or default_specification()

    @classmethod
    def load(cls, path: str | Path) -> FailureNetwork:
        """Read a network from its JSON file; see `neuraldbg.models.network_file`."""
        return cls(read_specification(path))

    def save(self, path: str | Path) -> None:
        """Write the network as JSON, from which `load` makes an equal one."""
        write_specification(self.specification, path)

    @cached_property
    def pgmpy(self) -> DiscreteBayesianNetwork:
        """The same network as a pgmpy model, built (and pgmpy imported) on first use."""
        return build_network(self.specification)

    def read_evidence(
        self, events: pd.DataFrame, series: pd.DataFrame | Observed
    ) -> dict[str, str]:
        """The states of the observed nodes for one run; see `neuraldbg.models.evidence`."""
        return read_evidence(events, series, self.specification)

    def posterior(self, evidence: Mapping[str, str]) -> Posterior:
        """The exact posterior of all causes given the evidence.

        Args:
            evidence: Observation to state; observations left out count as not observed.

        Raises:
            KeyError: an observation or state does not exist; the message lists those that do.
        """
        for name, state in evidence.items():
            self.specification.observation(name).state(state)
        return pass_messages(self.specification, evidence)

    def findings(self, cause: FailureMode, evidence: Mapping[str, str]) -> list[Finding]:
        """How each piece of evidence weighs on a cause, the heaviest first."""
        return weigh_evidence(self.specification, cause, evidence)

    def events_behind(
        self, finding: Finding, events: Sequence[SemanticEvent]
    ) -> list[SemanticEvent]:
        """Those of a run's events from which a finding's state was read."""
        observation = self.specification.observation(finding.observation)
        return matching_events(observation.state(finding.state), events)


@cache
def default_network() -> FailureNetwork:
    """The shipped network, built once a process."""
    return FailureNetwork()
