"""Batch normalisation over batches too small or unlike, or with running statistics that lag."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import last_known
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 5
_RECENT = 5
"""Last captured steps that tell where the running statistics ended."""


def detect_batch_too_small(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Batches of few samples, most of the time, whose statistics differ from the running ones.

    The running statistics must have had the time to settle.
    """
    panel = panels.of(Kind.OUTPUT)
    size, distance = panel["batch_size"], panel["running_distance"]
    settled = np.where(panel["running_lag"] <= thresholds.statistics_lag, distance, np.nan)
    for layer in np.flatnonzero((~np.isnan(settled)).sum(axis=0) >= _FEWEST_FRAMES):
        usual, unlike = float(np.nanmedian(size[:, layer])), float(np.nanmedian(settled[:, layer]))
        if usual <= thresholds.batch_small and unlike > thresholds.statistics_unlike:
            steps = np.flatnonzero(size[:, layer] <= thresholds.batch_small)
            yield event_at(
                panel,
                EventType.BATCH_TOO_SMALL,
                int(layer),
                (int(steps[0]), int(steps[-1])),
                ("usual", "tiny" if usual <= thresholds.batch_small / 2 else "small"),
                usual,
                thresholds.batch_small,
                ratio_severity(unlike, thresholds.statistics_unlike),
            )


def detect_statistics_lagging(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Running statistics that move so slowly that they are still off at the end of the run."""
    panel = panels.of(Kind.OUTPUT)
    lag, distance = panel["running_lag"], panel["running_distance"]
    remaining = last_known(lag)
    for layer in np.flatnonzero(remaining > thresholds.statistics_lag):
        steps = np.flatnonzero(~np.isnan(distance[:, layer]))
        # The usual momentum has forgotten its start by the time that this many steps are known.
        if len(steps) < _FEWEST_FRAMES or panel.steps[steps[-1]] + 1 < thresholds.minimum_steps:
            continue
        off = float(np.median(distance[steps[-_RECENT:], layer]))
        if off > thresholds.statistics_off:
            yield event_at(
                panel,
                EventType.STATISTICS_LAGGING,
                int(layer),
                (int(steps[0]), int(steps[-1])),
                ("settled", "lagging"),
                off,
                thresholds.statistics_off,
                float(remaining[layer]),
            )
