"""Networks that come to put out the same for every sample: collapsed rank, a constant output."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, layer_spans, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 5
_FIRST_FRAMES = 3


def detect_activations_alike(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Hidden layers from which on nothing tells samples apart any more, to the end of the run.

    A layer has collapsed where its rows differ far less, relative to their size, than at first. A
    collapsed layer that others go round (a residual branch, one of several heads) loses nothing:
    all layers after it must have collapsed as well. The event is of the first such layer, and
    never of the last: an output may rightly be constant.
    """
    panel = panels.of(Kind.OUTPUT)
    spread = panel["row_spread"]
    if len(panel) < _FIRST_FRAMES + _FEWEST_FRAMES:
        return
    at_first = _early(spread)
    known = np.isfinite(at_first)
    limit = np.fmin(thresholds.alike_fall * at_first, thresholds.alike_spread)
    with np.errstate(invalid="ignore"):
        collapsed = spread < limit
    # Layers of one unit, or of one row, tell nothing: they are as those after them.
    open_ended = collapsed | ~known
    all_after = np.logical_and.accumulate(open_ended[:, ::-1], axis=1)[:, ::-1]
    lost = collapsed & all_after
    lost[:, -1] = False
    first = lost & ~_shifted(lost)
    for layer, span in layer_spans(panel, first, _FEWEST_FRAMES):
        if span[1] == len(panel) - 1:
            yield _event(panel, spread, limit, layer, span)


def _early(spread: np.ndarray) -> np.ndarray:
    """The first known values of each layer: their median, NaN where there are too few."""
    found = np.full(spread.shape[1], np.nan)
    for layer in range(spread.shape[1]):
        values = spread[:_FIRST_FRAMES, layer]
        values = values[np.isfinite(values)]
        if len(values):
            found[layer] = np.median(values)
    return found


def _shifted(lost: np.ndarray) -> np.ndarray:
    """Whether any layer before has lost it already."""
    before = np.zeros_like(lost)
    before[:, 1:] = np.logical_or.accumulate(lost, axis=1)[:, :-1]
    return before


def _event(
    panel: Panel, spread: np.ndarray, limit: np.ndarray, layer: int, span: tuple[int, int]
) -> SemanticEvent:
    value = float(np.nanmin(spread[span[0] : span[1] + 1, layer]))
    threshold = float(limit[layer])
    states = ("varied", "alike")
    severity = ratio_severity(value, threshold)
    return event_at(
        panel, EventType.ACTIVATIONS_ALIKE, layer, span, states, value, threshold, severity
    )
