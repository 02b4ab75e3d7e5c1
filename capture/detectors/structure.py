"""What the graph behind the loss shows whatever the numbers are: axes and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.loss_findings import AXIS, BROADCAST, finding
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_wrong_axis(
    panels: Panels,
    thresholds: Thresholds,
) -> Iterator[SemanticEvent]:
    """A softmax over another axis than the classes or keys, a reshape that mixes axes."""
    yield from _structural_events(panels, EventType.REDUCTION_OVER_WRONG_AXIS, AXIS)


def detect_broadcast(
    panels: Panels,
    thresholds: Thresholds,
) -> Iterator[SemanticEvent]:
    """Every prediction compared with every target."""
    yield from _structural_events(panels, EventType.SHAPES_BROADCAST, BROADCAST)


def _structural_events(panels: Panels, event_type: EventType, name: str) -> Iterator[SemanticEvent]:
    panel = panels.of(Kind.LOSS)
    found = np.array([text is not None for text in details_of(panel, name)], dtype=bool)
    if found.any():
        yield structural_event(panel, event_type, name, found)


def structural_event(
    panel: Panel, event_type: EventType, name: str, found: np.ndarray
) -> SemanticEvent:
    """The event of a finding that a panel's rows name, over all rows from the first to the last.

    Args:
        panel: Of the loss.
        event_type: What the finding means.
        name: Of the finding.
        found: Rows that name it, shape (steps,).
    """
    rows = np.flatnonzero(found)
    span = (int(rows[0]), int(rows[-1]))
    event = event_at(panel, event_type, None, span, ("fitting", "unfitting"), 1.0, 0.0, 1.0)
    return replace(event, detail=details_of(panel, name)[rows[0]] or "")


def details_of(panel: Panel, name: str) -> list[str | None]:
    """What each row of the loss says under a name."""
    if not panel.layers:
        return []
    return [finding(detail, name) for detail in panel.details[:, 0]]
