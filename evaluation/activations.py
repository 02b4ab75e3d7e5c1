"""Activation functions by name, as modules and as functions, and the layers that feed them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATION_MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}
"""The module class of each activation."""

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
}
"""The function of each activation, for networks that call it in ``forward``."""


@runtime_checkable
class NamesActivatedLayers(Protocol):
    """A network whose ``forward`` calls its activations as functions, and says on what."""

    def activated_layers(self) -> list[nn.Module]:
        """The layers whose output goes straight into an activation, input side first."""
        ...


def activated_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose output goes straight into an activation, input side first.

    In a sequence of modules it is the one before each activation module; other networks name
    theirs in a method ``activated_layers``.

    Example:
        >>> activated_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        [Linear(in_features=2, out_features=3, bias=True)]
    """
    if isinstance(model, NamesActivatedLayers):
        return model.activated_layers()
    kinds = tuple(ACTIVATION_MODULES.values())
    found: list[nn.Module] = []
    for sequence in model.modules():
        if isinstance(sequence, nn.Sequential):
            layers = list(sequence)
            found += [before for before, after in pairwise(layers) if isinstance(after, kinds)]
    return found
