"""Updates and gradients that jump far above what is usual in the run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.detectors.alignment import aligned
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity, spans
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_BEFORE = 10
"""Rows that must come before a spike: the first updates of adaptive optimizers are large."""
_WINDOW = 32
_USUAL = 0.9
"""Quantile of a run so far that stands for its usual upper end."""
_APART = 8
"""Steps after the first jump of a gradient from which another one counts as another."""
_MOST_EVENTS = 16


def detect_update_spiking(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Updates far above all that is usual in the run, at gradients that are usual in it.

    Such updates come from the optimizer's own memory: a second moment that forgot (Adam's beta2
    after a quiet stretch), or momentum that piled up. Updates are taken per learning rate, so that
    schedules do not count. Only captured steps have updates: spikes between them are not seen.
    """
    panel = panels.of(Kind.UPDATE)
    if len(panel) <= _BEFORE or not _remembers(panels.of(Kind.OPTIMIZER)):
        return
    gradient = aligned(panel, panels.of(Kind.GRADIENT), "norm")
    rates = aligned(panel, panels.of(Kind.PARAMETER), "learning_rate")
    with np.errstate(divide="ignore", invalid="ignore"):
        update = np.where(rates > 0, panel["rms"] / rates, np.nan)
    jump, calm = over_usual(update), over_usual(gradient) < thresholds.gradient_usual
    jump = np.where(calm & np.isfinite(jump), jump, 0.0)
    if not jump.shape[1]:
        return
    largest, layers = jump.max(axis=1), jump.argmax(axis=1)
    for first, last in spans(largest > thresholds.update_spike)[:_MOST_EVENTS]:
        peak = first + int(largest[first : last + 1].argmax())
        yield event_at(
            panel,
            EventType.UPDATE_SPIKING,
            int(layers[peak]),
            (first, last),
            ("ordinary", "spiking"),
            float(largest[peak]),
            thresholds.update_spike,
            ratio_severity(float(largest[peak]), thresholds.update_spike),
        )


def _remembers(panel: Panel) -> bool:
    """Whether an optimizer keeps averages of gradients that can lead it astray."""
    return bool((panel["momentum"] > 0).any() or (panel["beta2"] > 0).any())


def detect_gradient_spiking(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Global gradient norms that jump above those just before and all that is usual in the run.

    Where gradients are clipped the norm before counts. One jump is met in healthy runs too, mostly
    of recurrent networks; the event is that they come again.
    """
    panel = panels.of(Kind.LOSS)
    if len(panel) <= _BEFORE:
        return
    norm = panel["norm"]
    before_clip = aligned(panel, panels.of(Kind.OPTIMIZER), "norm_before_clip")
    norm = np.where(np.isfinite(before_clip), before_clip, norm)
    norm = np.where(np.isfinite(norm), norm, np.nan)
    for column in range(norm.shape[1]):
        yield from _jumps(panel, norm[:, column], thresholds)


def _jumps(panel: Panel, norm: np.ndarray, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    course = pd.Series(norm).rolling(_WINDOW, min_periods=_BEFORE).median().shift(1).to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        jump = norm / course
    unusual = over_usual(norm[:, None])[:, 0] > thresholds.gradient_unusual
    found = spans((jump > thresholds.gradient_spike) & unusual)
    if not found or found[-1][0] - found[0][0] < _APART:
        return
    for first, last in found[:_MOST_EVENTS]:
        value = float(np.nanmax(jump[first : last + 1]))
        yield event_at(
            panel,
            EventType.GRADIENT_SPIKING,
            None,
            (first, last),
            ("ordinary", "spiking"),
            value,
            thresholds.gradient_spike,
            ratio_severity(value, thresholds.gradient_spike),
        )


def over_usual(values: np.ndarray) -> np.ndarray:
    """Each value over the usual upper end of those before it in its column.

    Args:
        values: Shape (steps, columns), NaN where not known.

    Returns:
        The same shape, NaN where fewer than 10 known values come before.

    Example:
        >>> over_usual(np.array([[1.0]] * 10 + [[6.0]]))[-1].tolist()
        [6.0]
    """
    usual = pd.DataFrame(values).expanding(min_periods=_BEFORE).quantile(_USUAL).shift(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(values / usual.to_numpy())
