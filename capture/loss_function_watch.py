"""Seeing calls of loss functions that no backward pass follows.

Loss modules and most code look a function up in `torch.nn.functional` when they call it, so a
replacement there sees them. It is in place only while somebody watches, and passes on at once
in code that is being compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

LOSS_FUNCTIONS = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss",
    "gaussian_nll_loss", "ctc_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "cosine_embedding_loss", "triplet_margin_loss",
)  # fmt: skip
"""Functions of `torch.nn.functional` whose calls are seen."""

LossCall = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with a function's name, its arguments and its result; must not raise."""


class _Replacements:
    """Stand in for the loss functions while there are watchers."""

    def __init__(self) -> None:
        self.watchers: list[LossCall] = []
        self._in_place: dict[str, tuple[Any, Any]] = {}
        self._made: dict[str, tuple[Any, Any]] = {}
        self._inside = False

    def add(self, watcher: LossCall) -> None:
        self.watchers.append(watcher)
        for name in LOSS_FUNCTIONS:
            original = getattr(functional, name, None)
            if original is not None and name not in self._in_place:
                replacement = self._replacement(name, original)
                self._in_place[name] = (original, replacement)
                setattr(functional, name, replacement)

    def remove(self, watcher: LossCall) -> None:
        if watcher in self.watchers:
            self.watchers.remove(watcher)
        if self.watchers:
            return
        for name, (original, replacement) in list(self._in_place.items()):
            # Somebody may have replaced the function after us; theirs must then stay, and ours,
            # which theirs calls, only passes on.
            if getattr(functional, name) is replacement:
                setattr(functional, name, original)
                del self._in_place[name]

    def _replacement(self, name: str, original: Any) -> Any:
        """One object for each original: compiled code that guards it is not compiled again."""
        known = self._made.get(name)
        if known is None or known[0] is not original:
            known = self._made[name] = (original, self._passing_on(name, original))
        return known[1]

    def _passing_on(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def passing_on(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._inside:
                return original(*args, **kwargs)
            self._inside = True  # tensor subclasses come back with the function they were given
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            for watcher in tuple(self.watchers):
                watcher(name, args, kwargs, result)
            return result

        return passing_on


_replacements = _Replacements()


def watch_loss_functions(watcher: LossCall) -> Callable[[], None]:
    """Call a watcher after every call of a loss function; returns the function that ends it.

    Functions imported by name before that are not seen; the modules of `torch.nn` that use them
    are.

    Example:
        >>> seen = []
        >>> stop = watch_loss_functions(lambda name, args, kwargs, loss: seen.append((name, loss)))
        >>> loss = torch.nn.MSELoss()(torch.ones(2), torch.zeros(2))
        >>> stop()
        >>> seen
        [('mse_loss', tensor(1.))]
    """
    _replacements.add(watcher)
    return lambda: _replacements.remove(watcher)
