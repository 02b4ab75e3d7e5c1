"""Layers and losses that are not the same in evaluation as in training, at the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.loss_curve import loss_curve
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_NEIGHBOURS = 2
"""Captured training steps on either side of an evaluation whose range is what is usual."""
_FEWEST_LOSSES = 2
_WIDTH = 0.05
"""Share of the run around an evaluation over which training losses are taken together."""


def detect_evaluation_gap(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Outputs, or a loss, that change with the mode.

    Dropout leaves out what evaluation keeps, and batch norm goes by its running statistics there:
    both change the scale of the layers after them. Data of another kind would do so too, and
    show in the inputs; those evaluations are passed over.

    The state tells which side is better off: ``eval_better`` (dropout), ``eval_worse`` (running
    statistics), ``differs`` where no comparable loss was seen.
    """
    gap = _loss_gap(panels)
    outputs = panels.of(Kind.OUTPUT, evaluation=True)
    ratios = _output_ratios(panels, outputs)
    lasting = np.array([_median(column) for column in ratios.T])
    found = np.flatnonzero(lasting > thresholds.evaluation_gap)
    if len(found):
        state = "differs" if gap is None else _direction(gap[1], thresholds)
        layer = int(found[0])  # where it comes in; it shows in all that follow
        at = np.flatnonzero(ratios[:, layer] > thresholds.evaluation_gap)
        yield event_at(
            outputs,
            EventType.EVALUATION_GAP,
            layer,
            (int(at[0]), int(at[-1])),
            ("alike", state),
            float(lasting[layer]),
            thresholds.evaluation_gap,
            ratio_severity(float(lasting[layer]), thresholds.evaluation_gap),
        )
    elif gap is not None and gap[1] > thresholds.evaluation_loss_gap:
        panel, share, ratio = gap
        event = event_at(
            panel,
            EventType.EVALUATION_GAP,
            None,
            (0, len(panel) - 1),
            ("alike", "eval_better"),
            ratio,
            thresholds.evaluation_loss_gap,
            share_severity(share, thresholds.evaluation_loss_gap),
        )
        yield replace(event, detail="loss")


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0


def _direction(share: float, thresholds: Thresholds) -> str:
    if share > thresholds.evaluation_loss_gap / 4:
        return "eval_better"
    return "eval_worse" if share < -thresholds.evaluation_loss_gap / 4 else "differs"


def _output_ratios(panels: Panels, outputs: Panel) -> np.ndarray:
    """How far each layer's rms lies outside the range of the training steps around it.

    Returns:
        Shape (evaluations, layers of the evaluation), at least 1, NaN where it cannot be told.
    """
    inputs = panels.of(Kind.INPUT, evaluation=True)
    off = _ratios(inputs, panels.of(Kind.INPUT)) if len(inputs) else np.zeros((0, 0))
    ratios = _ratios(outputs, panels.of(Kind.OUTPUT))
    if off.size:
        data = dict(zip(inputs.steps.tolist(), np.fmax.reduce(off, axis=1), strict=True))
        scale = np.array([data.get(step, np.nan) for step in outputs.steps.tolist()])
        # What the data explain is no sign of the mode.
        ratios = ratios / np.where(np.isfinite(scale), scale**2, 1.0)[:, None]
    return ratios


def _ratios(evaluation: Panel, training: Panel) -> np.ndarray:
    result = np.full((len(evaluation), len(evaluation.layers)), np.nan)
    column = {name: position for position, name in enumerate(training.layers)}
    for row, step in enumerate(evaluation.steps):
        at = int(np.searchsorted(training.steps, step))
        rows = slice(max(at - _NEIGHBOURS, 0), at + _NEIGHBOURS)
        for layer, name in enumerate(evaluation.layers):
            if name not in column:
                continue
            usual = training["rms"][rows, column[name]]
            usual = usual[usual > 0]
            value = evaluation["rms"][row, layer]
            if len(usual) and value > 0:
                result[row, layer] = max(value / usual.max(), usual.min() / value, 1.0)
    return result


def _loss_gap(panels: Panels) -> tuple[Panel, float, float] | None:
    """By how much the training loss exceeds that of evaluations, in the median over these.

    Returns:
        The panel of the evaluations, the difference as a share of the first training loss, and
        the ratio of the losses; None where they are not the same quantity.
    """
    panel, curve = panels.of(Kind.LOSS, evaluation=True), loss_curve(panels)
    if curve is None or not panel.layers:
        return None
    values = np.where(panel["comparable"][:, 0] == 1, panel["value"][:, 0], np.nan)
    known = np.flatnonzero(np.isfinite(values) & (panel.steps > 0))
    start = float(np.median(curve.values[:3]))
    if len(known) < _FEWEST_LOSSES or start <= 0:
        return None
    width = max(int(_WIDTH * len(curve)), 3)
    differences, ratios = [], []
    for row in known:
        at = int(np.searchsorted(curve.steps, panel.steps[row]))
        usual = float(np.median(curve.values[max(at - width, 0) : at + width]))
        differences.append((usual - values[row]) / start)
        ratios.append(usual / max(values[row], 1e-12))
    return panel, float(np.median(differences)), float(np.median(ratios))
