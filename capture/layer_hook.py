"""The forward hook on a watched module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from neuraldbg.capture.layers import Layer


class LayerHook:
    """A forward hook bound to one layer.

    A class of its own, not a closure, so that a model can be copied and pickled while it is
    watched: copies of the hook stay silent since the module they are called with is not theirs.

    Args:
        layer: The layer.
        callback: Called with the layer and the call's arguments and output, except while the
            module is traced by a compiler or an exporter.
    """

    def __init__(
        self,
        layer: Layer,
        callback: Callable[[Layer, Any, Any], None],
    ) -> None:
        self._layer = layer
        self._module = layer.module
        self._callback = callback

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pass the call on if it is of the watched module itself."""
        if torch.compiler.is_compiling() or module is not self._module:
            return
        self._callback(self._layer, args, output)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _silent_hook, ()


def _silent_hook() -> Callable[..., None]:
    return _ignore_call


def _ignore_call(*args: object) -> None:
    """What a pickled hook becomes."""
