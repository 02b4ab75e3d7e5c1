"""Activations applied by functions rather than by modules, found in the graph behind a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from neuraldbg.capture.graph_walk import Node, first_child, walk

_RECTIFIERS = ("ReluBackward0", "ThresholdBackward0")
_BOUNDED: Mapping[str, tuple[float, float]] = {
    "TanhBackward0": (-1.0, 1.0),
    "SigmoidBackward0": (0.0, 1.0),
}
_NODES_TO_OWNER = 8


@dataclass(slots=True)
class FunctionalActivation:
    """An activation applied by a function (`F.relu(self.fc(x))`) rather than by a module.

    Attributes:
        owner: Whatever the caller registered for the `grad_fn` of the layer it follows.
        result: Its saved output, valid until the graph is freed.
        bounds: Limits of a bounded activation, None for a rectifier.
    """

    owner: object
    result: Tensor
    bounds: tuple[float, float] | None


def find_functional_activations(
    loss: Tensor, producers: Mapping[Node, object]
) -> tuple[list[FunctionalActivation], int]:
    """Rectifiers and bounded activations in the graph that no watched module produced.

    Args:
        loss: The tensor that `backward` is called on.
        producers: The `grad_fn` of each watched layer's output, with the caller's key for it.

    Returns:
        The activations, nearest the loss first and one for each owner, and the number of nodes
        visited.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> hidden = layer(torch.ones(4, 3))
        >>> loss = torch.relu(hidden).sum()
        >>> found, _ = find_functional_activations(loss, {hidden.grad_fn: "fc1"})
        >>> found[0].owner, tuple(found[0].result.shape), found[0].bounds
        ('fc1', (4, 2), None)
    """
    found: dict[int, FunctionalActivation] = {}
    visited = 0
    for node in walk(loss.grad_fn):
        visited += 1
        name = node.name()
        bounds = _BOUNDED.get(name)
        if (bounds is None and name not in _RECTIFIERS) or node in producers:
            continue
        owner = _owner(node, producers)
        if owner is not None and id(owner) not in found:
            result = getattr(node, "_saved_result", None)
            if result is not None:
                found[id(owner)] = FunctionalActivation(owner, result.detach(), bounds)
    return list(found.values()), visited


def _owner(node: Node, producers: Mapping[Node, object]) -> object | None:
    """The layer that an activation follows: the nearest producer straight above it."""
    current: Node | None = node
    for _ in range(_NODES_TO_OWNER):
        current = first_child(current)
        if current is None:
            return None
        if current in producers:
            return producers[current]
    return None
