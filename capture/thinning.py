"""A list of bounded length that forgets evenly: the further back, the less of it is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class ThinningList(Generic[T]):
    """A list of bounded length that keeps its start, its recent end, and ever less between.

    When it is full, every second item between the first eighth and the last quarter goes.

    Attributes:
        limit: The most items it holds; at least 8.
        fold: Called with an item that goes and the one that stays in its place, so that what must
            not be lost can be handed over.
        before: Called before items go.

    Example:
        >>> kept = ThinningList(limit=16)
        >>> for item in range(40):
        ...     kept.append(item)
        >>> len(kept.items) <= 16, kept.items[:2], kept.items[-1]
        (True, [0, 1], 39)
    """

    limit: int
    fold: Callable[[T, T], None] | None = None
    before: Callable[[], None] | None = None
    items: list[T] = field(default_factory=list)

    def append(self, item: T) -> None:
        """Add an item at the end, thinning the middle first when the list is full."""
        while len(self.items) >= self.limit:
            count = len(self.items)
            self._thin()
            if len(self.items) == count:
                break  # too few for a middle
        self.items.append(item)

    def _thin(self) -> None:
        if self.before is not None:
            self.before()
        head, tail = len(self.items) // 8, len(self.items) - len(self.items) // 4
        middle = self.items[head:tail]
        if self.fold is not None:
            for kept, gone in zip(middle[::2], middle[1::2], strict=False):
                self.fold(gone, kept)
        self.items = self.items[:head] + middle[::2] + self.items[tail:]
