"""Outputs that are not what the loss is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.structure import details_of, structural_event
from neuraldbg.capture.loss_findings import DOMAIN
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_output_domain(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """An activation before the loss that does not suit it, or does not reach the target."""
    panel = panels.of(Kind.LOSS)
    if not panel.layers:
        return
    beyond = panel["unreachable"][:, 0]
    known = np.flatnonzero(np.isfinite(beyond))
    structural = np.array(
        [text is not None and not text.endswith(_BOUNDED) for text in details_of(panel, DOMAIN)]
    )
    if structural.any():
        yield structural_event(panel, EventType.OUTPUT_OUT_OF_DOMAIN, DOMAIN, structural)
        return
    share = float(beyond[known].mean()) if len(known) else 0.0
    if share > thresholds.unreachable_share:
        event = event_at(
            panel,
            EventType.OUTPUT_OUT_OF_DOMAIN,
            None,
            (int(known[0]), int(known[-1])),
            ("suitable", "unsuitable"),
            share,
            thresholds.unreachable_share,
            share_severity(share, thresholds.unreachable_share),
        )
        texts = [text for text in details_of(panel, DOMAIN) if text is not None]
        what = texts[0] if texts else "bounded output"
        yield replace(event, detail=f"{what}, target beyond its range")


_BOUNDED = " output"
"""How the text ends that names a bounded output, which suits most targets."""
