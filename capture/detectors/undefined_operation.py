"""Operations that were undefined at their value when a pass first turned non-finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.structure import details_of
from neuraldbg.capture.loss_findings import UNDEFINED
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_undefined_operation(
    panels: Panels,
    thresholds: Thresholds,
) -> Iterator[SemanticEvent]:
    """The operations that were named, one event for each, with the batch."""
    panel = panels.of(Kind.LOSS)
    if not panel.layers:
        return
    batches = panel["batch"][:, 0]
    named: dict[str, list[int]] = {}
    for row, text in enumerate(details_of(panel, UNDEFINED)):
        if text is not None:
            named.setdefault(text, []).append(row)
    for text, rows in named.items():
        states = ("defined", "undefined")
        span = (rows[0], rows[-1])
        event = event_at(panel, EventType.OPERATION_UNDEFINED, None, span, states, 1.0, 0.0, 1.0)
        batch = batches[rows[0]]
        where = "" if np.isnan(batch) else f", batch {batch:.0f}"
        yield replace(event, detail=f"{text}{where}")
