"""Seeing every backward pass without asking the training loop for anything.

`Tensor.backward` looks `torch.autograd.backward` up when it is called, so one replacement there
sees both. It is in place only while somebody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


_watchers: list[BackwardWatcher] = []
_original: Callable[..., None] | None = None


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
    global _original
    _watchers.append(watcher)
    if _original is None:
        _original = torch.autograd.backward
        torch.autograd.backward = _watched_backward

    def stop() -> None:
        global _original
        if watcher in _watchers:
            _watchers.remove(watcher)
        # Somebody may have replaced the function after us; theirs must then stay, and ours,
        # which theirs calls, only passes on.
        if not _watchers and torch.autograd.backward is _watched_backward and _original:
            torch.autograd.backward = _original
            _original = None

    return stop


def _watched_backward(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
    assert _original is not None
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    watchers = tuple(_watchers)
    for watcher in watchers:
        watcher.before(roots)
    try:
        _original(tensors, *args, **kwargs)
    finally:
        for watcher in watchers:
            watcher.after()
