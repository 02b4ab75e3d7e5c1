"""Rectifier units that are zero for every sample and stay so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans, share_severity
from neuraldbg.events import ActivationHealth, EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_dead_units(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers most of whose units are dead.

    A unit is dead when it has been zero through `Thresholds.dead_samples` samples. The event
    begins where the silence began, not where it had lasted long enough to be sure.
    """
    panel = panels.of(Kind.OUTPUT)
    dead, silent = panel["dead_fraction"], panel["silent_fraction"]
    for layer, (start, end) in layer_spans(panel, dead >= thresholds.dead_share):
        value = float(dead[start : end + 1, layer].max())
        quiet = silent[: start + 1, layer] >= thresholds.dead_share
        loud = np.flatnonzero(~quiet)
        onset = int(loud[-1]) + 1 if len(loud) else 0
        yield event_at(
            panel,
            EventType.ACTIVATION_DEAD,
            layer,
            (min(onset, start), end),
            (ActivationHealth.NORMAL.value, ActivationHealth.DEAD.value),
            value,
            thresholds.dead_share,
            share_severity(value, thresholds.dead_share),
        )
