"""Shocks in the loss or the gradient, after which a run is looked at closely for some steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

CLOSE_STEPS = 8
"""Steps that are captured one by one after a shock."""
REST_STEPS = 256
"""Steps from one shock to the next that counts: a run that is nothing but shocks stays cheap."""
LOSS_JUMP = 2.0
"""Loss over the largest of the last steps that makes a shock: noise stays below."""
GRADIENT_JUMP = 3.0
"""The same for the gradient's norm."""
_WINDOW = 16


@dataclass(slots=True)
class Trip:
    """Tells when to look closely: a deterministic function of the losses and norms it is shown.

    Example:
        >>> trip = Trip()
        >>> for step in range(20):
        ...     trip.note(step, loss=1.0, norm=0.5)
        >>> trip.active(20)
        False
        >>> trip.note(20, loss=9.0, norm=0.5)
        >>> trip.active(21), trip.active(21 + CLOSE_STEPS)
        (True, False)
    """

    _until: int = -1
    _rested: int = 0
    _broken: bool = False
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def note(self, step: int, loss: float, norm: float) -> None:
        """Show a step's loss and gradient norm; NaN where one is not known."""
        shock = self._jumps(self._losses, loss, LOSS_JUMP) or self._jumps(
            self._norms, norm, GRADIENT_JUMP
        )
        broken = math.isinf(loss) or math.isinf(norm) or (loss != loss and bool(self._losses))
        if broken and not self._broken:
            self._broken = shock = True
        if shock and step >= self._rested:
            self._until, self._rested = step + CLOSE_STEPS, step + REST_STEPS

    def active(self, step: int) -> bool:
        """Whether this step is to be looked at closely."""
        return step <= self._until

    @staticmethod
    def _jumps(recent: deque[float], value: float, factor: float) -> bool:
        if not math.isfinite(value):
            return False
        jumps = len(recent) == _WINDOW and value > factor * max(recent) > 0
        recent.append(value)
        return jumps
