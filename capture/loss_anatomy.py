"""What the autograd graph behind a loss tells: its kind, its target, its functional activations.

The graph is read at the moment of `backward`, before it is freed. Only what is already saved for
the backward pass is looked at; nothing is computed on whole tensors but means of the target.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Node = Any
"""A `grad_fn`; torch gives these classes no public name."""

MAX_NODES = 4_000
"""Nodes visited in one walk: about 6 ms. Losses and last layers come first."""
_HEAD_NODES = 12
"""Nodes below the root among which the loss function itself must stand."""

_SCALING = ("MulBackward0", "DivBackward0")
_TRANSPARENT = (
    "MeanBackward0", "SumBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
)  # fmt: skip
"""Nodes that a loss passes through on its way to the root without changing what it measures."""

_CLASS_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0")
_SQUARED_LOSSES = ("MseLossBackward0",)
_ABSOLUTE_LOSSES = ("L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_BINARY_LOSSES = ("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0")

_RECTIFIER_NODES = ("ReluBackward0", "ThresholdBackward0")
_BOUNDED_NODES: Mapping[str, tuple[float, float]] = {
    "TanhBackward0": (-1.0, 1.0),
    "SigmoidBackward0": (0.0, 1.0),
}


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


@dataclass(slots=True)
class LossAnatomy:
    """What was read from the graph behind one loss.

    Attributes:
        kind: ``classes``, ``squared``, ``absolute``, ``binary`` or None where not recognised.
        expected: What an untrained model should score: the log of the number of classes, the mean
            square (or magnitude) of the target, log 2; NaN where it cannot be told.
        target: The target as saved by the loss, or None. Valid until the graph is freed.
    """

    kind: str | None = None
    expected: float = math.nan
    target: Tensor | None = None


def read_loss_head(loss: Tensor) -> LossAnatomy:
    """The kind of a loss, its target and its expected value at the start.

    Args:
        loss: The tensor that `backward` is called on.

    Example:
        >>> logits = torch.zeros(4, 10, requires_grad=True)
        >>> anatomy = read_loss_head(torch.nn.functional.cross_entropy(logits, torch.arange(4)))
        >>> anatomy.kind, round(anatomy.expected, 3)
        ('classes', 2.303)
        >>> target = torch.tensor([[3.0], [-3.0]])
        >>> outputs = torch.zeros(2, 1, requires_grad=True)
        >>> read_loss_head(torch.nn.functional.mse_loss(outputs, target) / 4).expected
        2.25
    """
    node, factor = loss.grad_fn, 1.0
    for _ in range(_HEAD_NODES):
        if node is None:
            break
        found = _loss_of(node)
        if found is not None:
            found.expected *= factor
            return found
        name = node.name()
        if name in _SCALING:
            factor *= _scale_of(node, name)
        elif name not in _TRANSPARENT:
            break
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return LossAnatomy()


def _loss_of(node: Node) -> LossAnatomy | None:
    name = node.name()
    if name in _CLASS_LOSSES:
        classes = node._saved_self.shape[1 if node._saved_self.dim() > 1 else 0]
        return LossAnatomy("classes", math.log(max(classes, 2)), node._saved_target)
    if name in _BINARY_LOSSES:
        return LossAnatomy("binary", math.log(2), node._saved_target)
    if name in _SQUARED_LOSSES:
        return LossAnatomy("squared", _mean(node._saved_target, torch.square), node._saved_target)
    if name in _ABSOLUTE_LOSSES:
        return LossAnatomy("absolute", _mean(node._saved_target, torch.abs), node._saved_target)
    return None


def _mean(target: Tensor, function: Callable[[Tensor], Tensor]) -> float:
    return float(function(target.detach().float()).mean())


def _scale_of(node: Node, name: str) -> float:
    """The constant a loss was multiplied with, NaN where it is not a constant number."""
    other = node._saved_other
    if other is None or other.numel() != 1 or other.requires_grad:
        return math.nan
    number = float(other)
    return number if name == "MulBackward0" else 1.0 / number if number else math.nan


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
        >>> layer = torch.nn.Linear(3, 2)
        >>> hidden = layer(torch.ones(4, 3))
        >>> loss = torch.relu(hidden).sum()
        >>> found, _ = find_functional_activations(loss, {hidden.grad_fn: "fc1"})
        >>> found[0].owner, tuple(found[0].result.shape), found[0].bounds
        ('fc1', (4, 2), None)
    """
    found: dict[int, FunctionalActivation] = {}
    visited = 0
    for node in _walk(loss.grad_fn):
        visited += 1
        name = node.name()
        bounds = _BOUNDED_NODES.get(name)
        if (bounds is None and name not in _RECTIFIER_NODES) or node in producers:
            continue
        owner = _owner(node, producers)
        if owner is not None and id(owner) not in found:
            result = getattr(node, "_saved_result", None)
            if result is not None:
                found[id(owner)] = FunctionalActivation(owner, result.detach(), bounds)
    return list(found.values()), visited


def _walk(root: Node | None) -> Iterator[Node]:
    seen = {root}
    queue = deque([root] if root is not None else [])
    visited = 0
    while queue and visited <= MAX_NODES:
        visited += 1
        node = queue.popleft()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


def reaches(root: Tensor, parameters: Container[Tensor]) -> bool:
    """Whether a backward pass from a root leads to one of some parameters.

    The parameters of a last layer stand near the root, so that a loss of one's own is told after
    a few nodes. A graph too large to walk counts as one that does, and so does one with custom
    functions in it: reentrant checkpointing hides everything behind one.

    Example:
        >>> weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> loss = (3 * weight).sum()
        >>> reaches(loss, {weight}), reaches(loss, {other})
        (True, False)
    """
    visited, hidden = 0, False
    for node in _walk(root.grad_fn):
        visited += 1
        hidden = hidden or isinstance(node, torch.autograd.function.BackwardCFunction)
        variable = getattr(node, "variable", None)
        if variable is not None and variable in parameters:
            return True
    return hidden or visited > MAX_NODES


def _owner(node: Node, producers: Mapping[Node, object]) -> object | None:
    """The layer that an activation follows: the nearest producer straight above it."""
    for _ in range(8):
        node = next((child for child, _ in node.next_functions if child is not None), None)
        if node is None:
            return None
        if node in producers:
            return producers[node]
    return None
