"""A self-imposed budget: how often to look, so that looking stays within its share of the time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from neuraldbg.capture.schedule import Schedule

START_STEPS = 512
"""Steps at the start that follow the fixed schedule: most faults show there, a fixed schedule sees
a repeated run the same way, and a run that ends here has cost a fraction of a second."""
START_SECONDS = 1.0
"""What the start may cost before the budget takes over early: models whose captured steps are dear
must not pay for all of the start."""
_WINDOW = 15
"""Recent steps of each sort whose median is believed: single steps are noisy."""
_LONGEST_PERIOD = 1024
_LEAST_SHARE = 0.25
"""Share of the budget that captured steps get even where the others use it up alone."""


@dataclass(slots=True)
class _Recent:
    """Times of the last steps of one sort."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    spent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def add(self, seconds: float, spent: float) -> None:
        self.seconds.append(seconds)
        self.spent.append(spent)


@dataclass(slots=True)
class Budget:
    """Captures as often as a share of the training's time allows.

    It measures what steps cost with and without capture and sets the distance between captured
    steps, a power of two, so that ranks with budgets of their own still meet on common steps.

    Attributes:
        overhead: Share of the bare step time that capture may take, such as 0.02.
        start: The fixed schedule of the first `START_STEPS` steps.
        period: Distance between captured steps after that.

    Raises:
        ValueError: the overhead is not above 0 or not finite.

    Example:
        >>> budget = Budget(overhead=0.02)
        >>> for step in range(600):
        ...     captured = budget.captures(step)
        ...     spent = 1e-3 if captured else 1e-5
        ...     budget.note_step(seconds=5e-3 + spent, spent=spent, captured=captured)
        >>> budget.period
        16
        >>> Budget(overhead=0)
        Traceback (most recent call last):
        ...
        ValueError: overhead=0 must be a share of the step time above 0, such as 0.02
    """

    overhead: float = 0.02
    start: Schedule = field(default_factory=Schedule)
    period: int = 64
    _spent: float = 0.0
    _light: _Recent = field(default_factory=_Recent)
    _captured: _Recent = field(default_factory=_Recent)

    def __post_init__(self) -> None:
        if not (self.overhead > 0 and math.isfinite(self.overhead)):
            raise ValueError(
                f"overhead={self.overhead} must be a share of the step time above 0, such as 0.02"
            )

    def captures(self, step: int) -> bool:
        """Whether this step's tensors are to be sampled."""
        if step < START_STEPS and self._spent < START_SECONDS:
            return self.start.captures(step)
        return step % self.period == 0

    def note_step(self, seconds: float, spent: float, captured: bool) -> None:
        """Learn from a step.

        Args:
            seconds: From the end of the step before to the end of this one.
            spent: Of these, inside capture.
            captured: Whether it was sampled.
        """
        self._spent += spent
        (self._captured if captured else self._light).add(seconds, spent)
        if captured:
            self.period = self._fitting_period()

    def period_at(self, step: int) -> int:
        """Distance between captured steps around this step."""
        return self.start.period_at(step) if step < START_STEPS else self.period

    def _fitting_period(self) -> int:
        captured, light = self._captured, self._light
        usual = light if light.spent else captured
        bare = max(median(usual.seconds) - median(usual.spent), 1e-9)
        dearer = median(captured.spent) - (median(light.spent) if light.spent else 0.0)
        if light.spent:  # hooks also slow down what is not measured inside them
            dearer = max(dearer, median(captured.seconds) - median(light.seconds))
        allowed = self.overhead * bare
        left = max(allowed - (median(light.spent) if light.spent else 0.0), _LEAST_SHARE * allowed)
        wanted = max(dearer / left, 1.0)
        return min(1 << math.ceil(math.log2(wanted)), _LONGEST_PERIOD)
