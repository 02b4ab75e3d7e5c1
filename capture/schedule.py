"""When to look: dense while a run is young, sparse later, dense again after a shock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are captured. Deterministic, so that a repeated run is seen the same way.

    Attributes:
        dense_steps: Steps captured one by one from the start, where most faults show.
        periods: Pairs (step, period) in rising order: from that step on, every period-th step.

    Raises:
        ValueError: a period is below 1 or the steps do not rise.

    Example:
        >>> schedule = Schedule(dense_steps=2, periods=((2, 5),))
        >>> [step for step in range(12) if schedule.captures(step)]
        [0, 1, 5, 10]
        >>> Schedule(periods=((10, 0),))
        Traceback (most recent call last):
        ...
        ValueError: Schedule: periods must rise in step, with periods of at least 1: ((10, 0),)
    """

    dense_steps: int = 24
    periods: tuple[tuple[int, int], ...] = ((24, 4), (120, 16), (200, 32), (2_000, 64))

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.periods]
        if steps != sorted(set(steps)) or any(period < 1 for _, period in self.periods):
            raise ValueError(
                f"Schedule: periods must rise in step, with periods of at least 1: {self.periods}"
            )

    def captures(self, step: int) -> bool:
        """Whether this step's tensors are to be sampled."""
        if step < self.dense_steps:
            return True
        return step % self.period_at(step) == 0

    def note_step(self, seconds: float, spent: float, captured: bool) -> None:
        """Nothing: a fixed schedule does not depend on what steps cost."""

    def period_at(self, step: int) -> int:
        """Distance between captured steps around this step."""
        current = 1
        for start, period in self.periods:
            if step >= start:
                current = period
        return current
