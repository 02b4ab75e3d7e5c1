"""Whether the loss is still on its way down when the run ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.loss_curve import block_medians, loss_curve
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.thresholds import Thresholds

_BLOCKS = 12
"""Parts into which the last third is cut; their medians carry the slope."""
_CONFIDENCE = 0.75
"""Share of the pairs of parts between which the loss must have fallen: of 12 independent values
without a trend one in a hundred does (Kendall's tau of 0.5)."""


def detect_loss_trend(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A loss that still falls at the end, by a large share of all that the run has gained.

    Every healthy run falls a little to its last step, the more the shorter it is. One that falls
    along a straight line gains a tenth of everything in its last tenth: it has not even begun to
    level off.
    """
    curve = loss_curve(panels)
    if curve is None or len(curve) < thresholds.minimum_steps:
        return
    third = len(curve) // 3
    slope, falling = theil_sen(block_medians(curve.values[-third:], _BLOCKS))
    if falling < _CONFIDENCE:
        return
    fall = -slope * min(_BLOCKS, third) * 0.1 * len(curve) / third
    width = max(len(curve) // 20, 3)
    start, end = (float(np.median(part)) for part in (curve.values[:width], curve.values[-width:]))
    if end < thresholds.loss_tail_left * start or not start > end > 0:
        return
    share = fall / (start - end)
    if share > thresholds.loss_tail_gain and fall / end > thresholds.loss_tail_fall:
        first = len(curve) - max(len(curve) // 10, 1)
        yield event_at(
            curve.panel,
            EventType.LOSS_STILL_FALLING,
            None,
            (int(curve.positions[first]), int(curve.positions[-1])),
            ("levelled", "falling"),
            fall / end,
            thresholds.loss_tail_fall,
            ratio_severity(share, thresholds.loss_tail_gain),
        )


def theil_sen(values: np.ndarray) -> tuple[float, float]:
    """The median slope over all pairs of points, and the share of pairs that fall.

    Robust to outliers in up to 29 % of the points (Theil 1950; Sen, JASA 63, 1968). The share of
    falling pairs is what Kendall's tau counts (Kendall 1938).

    Args:
        values: Shape (points,), evenly spaced, at least 2.

    Example:
        >>> theil_sen(np.array([4.0, 3.0, 2.0, 9.0, 0.0]))
        (-1.0, 0.7)
    """
    first, second = np.triu_indices(len(values), 1)
    slopes = (values[second] - values[first]) / (second - first)
    return float(np.median(slopes)), float(np.mean(slopes < 0))
