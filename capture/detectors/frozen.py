"""Random weights that are kept from learning by their `requires_grad` flag."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import always, last_known, of_layers
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_parameters_frozen(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers frozen at every captured step whose weights are random and matter to the loss.

    Frozen parts that were trained before are meant, and so are embeddings, tables and copies that
    change by other ways than an optimizer.
    """
    del thresholds
    panel = panels.of(Kind.PARAMETER)
    if not len(panel):
        return
    frozen = always(panel["trainable"], 0.0)
    fresh = last_known(panel["fresh"])
    if not frozen.any() or (frozen & (fresh == 0)).any():
        return
    rms = panel["rms"]
    for layer in np.flatnonzero(frozen & (fresh == 1) & _has_a_matrix(panels)):
        sizes = rms[~np.isnan(rms[:, layer]), layer]
        if not len(sizes) or sizes.min() != sizes.max():
            continue  # a moving average of other weights
        if last_known(panel["consumed"])[layer] != 1:
            continue  # a fixed target, or no part of what is trained
        span = (0, len(panel) - 1)
        states = ("trainable", "fresh")
        yield event_at(panel, EventType.PARAMETERS_FROZEN, int(layer), span, states, 0.0, 1.0, 1.0)


def _has_a_matrix(panels: Panels) -> np.ndarray:
    """Layers with inputs and units: neither norms nor embeddings nor tables of parameters."""
    panel = panels.of(Kind.PARAMETER)
    called = of_layers(panel, panels.of(Kind.OUTPUT), "rms")
    return np.asarray(~np.isnan(last_known(panel["gain"])) & ~np.isnan(called))
