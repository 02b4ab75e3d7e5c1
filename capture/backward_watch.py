"""Seeing every backward pass without asking the training loop for anything.

`Tensor.backward` looks `torch.autograd.backward` up when it is called, so one replacement there
sees both. It is in place only while somebody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BackwardWatcher:
    """Two callbacks around each backward pass; neither may raise.

    Attributes:
        before: Called with the roots (the losses) while the graph is intact.
        after: Called when the gradients are there, also when the pass failed.
    """

    before: Callable[[Sequence[Tensor]], None]
    after: Callable[[], None]


class _Replacement:
    """Stands in for `torch.autograd.backward` while there are watchers."""

    def __init__(self) -> None:
        self.watchers: list[BackwardWatcher] = []
        self._original: Callable[..., None] | None = None

    def __call__(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        given = tensors if isinstance(tensors, Sequence) else [tensors]
        roots = [root for root in given if isinstance(root, Tensor)]
        watchers = tuple(self.watchers)
        for watcher in watchers:
            watcher.before(roots)
        try:
            self._original(tensors, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.after()

    def add(self, watcher: BackwardWatcher) -> None:
        self.watchers.append(watcher)
        if self._original is None:
            self._original = torch.autograd.backward
            torch.autograd.backward = self

    def remove(self, watcher: BackwardWatcher) -> None:
        if watcher in self.watchers:
            self.watchers.remove(watcher)
        # Somebody may have replaced the function after us; theirs must then stay, and this one,
        # which theirs calls, only passes on.
        ours = cast("object", torch.autograd.backward) is self
        if not self.watchers and ours and self._original is not None:
            torch.autograd.backward = self._original
            self._original = None


_replacement = _Replacement()


def watch_backward(watcher: BackwardWatcher) -> Callable[[], None]:
    """Start calling a watcher around every backward pass; returns the function that ends it.

    Example:
        >>> seen = []
        >>> stop = watch_backward(BackwardWatcher(lambda roots: seen.append(roots[0].item()),
        ...                                       lambda: seen.append("after")))
        >>> (2 * torch.ones(1, requires_grad=True)).sum().backward()
        >>> stop()
        >>> seen
        [2.0, 'after']
    """
    _replacement.add(watcher)
    return lambda: _replacement.remove(watcher)
