"""Training in eval mode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import last_known, of_layers
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, spans
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3
_LASTING = 0.2
"""Share of the captured steps that eval mode must hold to the end: never switched back."""


def detect_evaluation_mode(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Dropout and normalisations in eval mode during most backward passes, or to the end.

    With the model in training mode single modules are put into eval mode on purpose; only a
    normalisation whose running statistics were never fed is then at fault. Frozen parts are not.
    """
    panel = panels.of(Kind.OUTPUT)
    if len(panel) < _FEWEST_FRAMES:
        return
    wrong = (panel["training"] == 0) & ((panel["model_training"] == 0) | (panel["fresh"] == 1))
    wrong &= ~_is_frozen(panel, panels.of(Kind.PARAMETER))[None, :]
    known = (~np.isnan(panel["training"])).sum(axis=0)
    for layer in np.flatnonzero(wrong.any(axis=0)):
        share = float(wrong[:, layer].sum() / known[layer])
        ends = [
            span for span in spans(wrong[:, layer], _FEWEST_FRAMES) if span[1] == len(panel) - 1
        ]
        lasting = bool(ends) and (ends[0][1] - ends[0][0] + 1) >= _LASTING * len(panel)
        if share > thresholds.sustained_share or lasting:
            steps = np.flatnonzero(wrong[:, layer])
            yield event_at(
                panel,
                EventType.EVALUATION_MODE,
                int(layer),
                (int(steps[0]), int(steps[-1])),
                ("training", "evaluation"),
                share,
                thresholds.sustained_share,
                share,
            )


def _is_frozen(panel: Panel, weights: Panel) -> np.ndarray:
    """Layers whose own parameters are frozen; without any, those of the layer that they follow."""
    own = of_layers(panel, weights, "trainable")
    trainable = last_known(weights["trainable"])
    for position in np.flatnonzero(np.isnan(own)):
        before = np.flatnonzero((weights.indices <= panel.indices[position]) & ~np.isnan(trainable))
        if len(before):
            own[position] = trainable[before[-1]]
    return np.asarray(own == 0)
