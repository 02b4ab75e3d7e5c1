"""Weight decay that outweighs what the loss asks for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import aligned
from neuraldbg.capture.loss_curve import LossCurve, loss_curve
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 5
_HALVED = 0.5
"""Share of the first loss below which a run learns, whatever its weights do."""


def detect_weight_decay(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose weights shrink under their decay while the loss does not come down.

    The decay of ordinary runs exceeds the gradient too, once they have converged: the gradient
    goes and the decay stays. That is no event, nor is decay in a layer that keeps its size.
    """
    panel, curve = panels.of(Kind.PARAMETER), loss_curve(panels)
    if len(panel) < _FEWEST_FRAMES or curve is None or len(curve) < thresholds.minimum_steps:
        return
    if _learns(curve):
        return
    rms = panel["rms"]
    decay = panel["weight_decay"] > 0
    outweighs = _outweighs(panels, panel)
    for layer in range(len(panel.layers)):
        known = np.flatnonzero(np.isfinite(rms[:, layer]))
        if len(known) < _FEWEST_FRAMES or not decay[:, layer].any() or rms[known[0], layer] <= 0:
            continue
        left = float(rms[known[-1], layer] / rms[known[0], layer])
        if left > thresholds.weight_shrinkage:
            continue
        yield from _dominant(panel, outweighs[:, layer], layer, thresholds)
        if left < thresholds.weight_collapse:
            below = known[rms[known, layer] < thresholds.weight_collapse * rms[known[0], layer]]
            yield event_at(
                panel,
                EventType.WEIGHTS_SHRINKING,
                layer,
                (int(below[0]), int(known[-1])),
                ("steady", "shrinking"),
                left,
                thresholds.weight_collapse,
                share_severity(1.0 - left, 1.0 - thresholds.weight_collapse),
            )


def _dominant(
    panel: Panel, ratio: np.ndarray, layer: int, thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    known = np.flatnonzero(np.isfinite(ratio))
    over = known[ratio[known] > thresholds.decay_over_gradient]
    if len(known) < _FEWEST_FRAMES or len(over) <= thresholds.sustained_share * len(known):
        return
    value = float(np.median(ratio[over]))
    yield event_at(
        panel,
        EventType.WEIGHT_DECAY_DOMINANT,
        layer,
        (int(over[0]), int(over[-1])),
        ("balanced", "dominant"),
        value,
        thresholds.decay_over_gradient,
        ratio_severity(value, thresholds.decay_over_gradient),
    )


def _outweighs(panels: Panels, panel: Panel) -> np.ndarray:
    """Weight decay over what the loss asks for, of shape (captured steps, layers).

    Where decay goes through the gradient (L2) that is decay times weight over gradient; where it
    shrinks the weights themselves, the shrinkage over the rest of the update.
    """
    rms, decay = panel["rms"], panel["weight_decay"]
    gradient = aligned(panel, panels.of(Kind.GRADIENT), "rms")
    update = aligned(panel, panels.of(Kind.UPDATE), "rms")
    shrinkage = panel["learning_rate"] * decay * rms
    with np.errstate(divide="ignore", invalid="ignore"):
        coupled = decay * rms / gradient
        rest = np.sqrt(np.fmax(update**2 - shrinkage**2, 0.0))
        decoupled = shrinkage / np.fmax(rest, 1e-3 * shrinkage)
    return np.asarray(np.where(panel["decoupled_decay"] == 1, decoupled, coupled))


def _learns(curve: LossCurve) -> bool:
    """Whether the loss has halved, or is still coming down in the second half of the run."""
    parts = np.array_split(curve.values, 10)
    medians = np.array([np.median(part) for part in parts])
    start = float(np.median(curve.values[:5]))
    if medians[-1] < _HALVED * start:
        return True
    return bool(medians[-1] < 0.9 * start and medians[-1] < 0.97 * medians[4])
