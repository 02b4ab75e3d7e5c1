"""What capture has cost a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What NeuralDBG spent inside a run, by its own clock.

    Attributes:
        seconds: Time inside its hooks and statistics.
        run_seconds: Time from entering the ``with`` to leaving it (or to now).
        steps: Steps of the run.
        captured_steps: Those of them whose tensors were sampled.
        period: Distance between captured steps at the end.

    Example:
        >>> print(Cost(0.4, 20.0, 1_000, 80, 32))
        0.40 s of 20.0 s (2.0 %); 80 of 1000 steps captured, every 32nd at the end
    """

    seconds: float
    run_seconds: float
    steps: int
    captured_steps: int
    period: int

    @property
    def share(self) -> float:
        """Share of the run's time without capture; 0 for a run that has not begun."""
        bare = self.run_seconds - self.seconds
        return self.seconds / bare if bare > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s of {self.run_seconds:.1f} s ({100 * self.share:.1f} %); "
            f"{self.captured_steps} of {self.steps} steps captured, every {_ordinal(self.period)} "
            "at the end"
        )


def _ordinal(number: int) -> str:
    """English ordinal, as ``1st``.

    >>> _ordinal(1), _ordinal(12), _ordinal(32), _ordinal(64)
    ('1st', '12th', '32nd', '64th')
    """
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
