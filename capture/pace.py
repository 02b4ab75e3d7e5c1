"""A pace that slows down: all of the first, then every second, every fourth, and so on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Decides which of an unknown number of occasions are taken, so that few are in the end.

    Attributes:
        first: Occasions taken one by one at the start, and half as many at each later stride.

    Example:
        >>> pace = Pace(first=4)
        >>> [occasion for occasion in range(24) if pace.is_due()]
        [0, 1, 2, 3, 4, 6, 8, 12, 16]
    """

    first: int
    _count: int = 0

    def is_due(self) -> bool:
        """Whether the occasion that now comes is taken."""
        count, self._count = self._count, self._count + 1
        stride = 1 << (count // self.first).bit_length()
        return count < self.first or count % stride == 0
