"""Steps that a gradient scaler goes on skipping."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.optimizer_rows import optimizer_columns
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_STEPS = 10


def detect_step_skipped(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A scaler that still skips steps in the second half of a run.

    A scaler begins with too large a scale on purpose, halves it at each of the first steps until
    gradients are finite, and tries a larger one every 2,000 steps (`torch.amp.GradScaler`).
    """
    panel = panels.of(Kind.OPTIMIZER)
    for column in optimizer_columns(panel):
        applied = panel["step_applied"][:, column]
        known = np.flatnonzero(np.isfinite(applied))
        if len(known) < _FEWEST_STEPS:
            continue
        share = float((applied[known[len(known) // 2 :]] == 0).mean())
        if share <= thresholds.skipped_share:
            continue
        skipped = np.flatnonzero(applied == 0)
        yield event_at(
            panel,
            EventType.STEP_SKIPPED,
            None,
            (int(skipped[0]), int(skipped[-1])),
            ("applied", "skipped"),
            share,
            thresholds.skipped_share,
            share_severity(share, thresholds.skipped_share),
        )
