"""The forward hook on a watched module, in eager code and in regions that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuraldbg.capture.compiled_regions import CompiledRegion
from neuraldbg.capture.layers import Layer


class LayerHook:
    """A forward hook bound to one layer.

    A class of its own, not a closure, so that a model can be copied and pickled while it is
    watched: copies of the hook stay silent since the module they are called with is not theirs.

    Args:
        layer: The layer.
        callback: Called with the layer and the call's arguments and output, outside of compilers.
        region: What the layer's values are handed to from compiled code, None if they are not.
    """

    def __init__(
        self,
        layer: Layer,
        callback: Callable[[Layer, Any, Any], None],
        region: CompiledRegion | None = None,
    ) -> None:
        self._layer = layer
        self._module = layer.module
        # Compiled code checks numbers, not whether a module is the same object: with this it is
        # not taken for that of a copy of the model.
        self._identity = id(layer.module)
        self._callback = callback
        self._region = region

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pass the call on if it is of the watched module itself."""
        if torch.compiler.is_compiling():
            if id(module) == self._identity:
                self._trace(args, output)
            return
        if module is not self._module:
            return
        self._callback(self._layer, args, output)

    def _trace(self, args: Any, output: Any) -> None:
        """Put operations into the graph under way that hand over the values when it runs."""
        region = self._region
        if region is None or not torch.is_grad_enabled():
            return
        if len(args) and isinstance(args[0], Tensor) and not args[0].requires_grad:
            region.hand_over(args[0], True)
        if isinstance(output, (tuple, list)) and len(output):
            output = output[0]
        if isinstance(output, Tensor):
            region.hand_over(output, False)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _silent_hook, ()


def _silent_hook() -> Callable[..., None]:
    return _ignore_call


def _ignore_call(*args: object) -> None:
    """What a pickled hook becomes."""
