"""Walking the autograd graph behind a loss, before the backward pass frees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

Node = Any
"""A `grad_fn`; torch gives these classes no public name."""

MAX_NODES = 4_000
"""Nodes visited in one walk: about 6 ms. Losses and last layers come first."""

VIEWS = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "ToCopyBackward0",
    "CloneBackward0", "AliasBackward0",
)  # fmt: skip
"""Nodes that hand on the same values in the same order, in another shape or number format."""
REORDERINGS = (
    "TransposeBackward0", "PermuteBackward0", "TBackward0", "SelectBackward0", "SliceBackward0",
)  # fmt: skip
"""Nodes that hand on the same values (or some of them) in another order."""


def walk(root: Node | None, limit: int = MAX_NODES) -> Iterator[Node]:
    """The nodes of a graph, each once, those nearest the root first."""
    seen = {root}
    queue = deque([root] if root is not None else [])
    visited = 0
    while queue and visited <= limit:
        visited += 1
        node = queue.popleft()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


def first_child(node: Node) -> Node | None:
    """The first operand that the graph goes on with, None at its end."""
    return next((child for child, _ in node.next_functions if child is not None), None)


def shape_of(node: Node) -> tuple[int, ...] | None:
    """The shape of a node's (first) result, None where torch does not tell.

    Example:
        >>> shape_of((torch.ones(2, 1, requires_grad=True) - torch.ones(2)).grad_fn)
        (2, 2)
    """
    metadata = getattr(node, "_input_metadata", None)  # the inputs of its backward pass
    return tuple(metadata[0].shape) if metadata else None


def source(node: Node | None, through: Container[str] = VIEWS) -> Node | None:
    """The node whose values a chain of views hands on: the node itself if it is no view.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> source((2 * x).view(2, 2).unsqueeze(0).grad_fn).name()
        'MulBackward0'
    """
    for _ in range(16):
        if node is None or node.name() not in through:
            return node
        node = first_child(node)
    return None


def reaches(root: Tensor, parameters: Container[Tensor]) -> bool:
    """Whether a backward pass from a root leads to one of some parameters.

    The parameters of a last layer stand near the root, so that a loss of one's own is told after
    a few nodes. A graph too large to walk counts as one that does, and so does one with custom
    functions in it: reentrant checkpointing hides everything behind one. Code compiled by
    `torch.compile` is one node that hides nothing.

    Example:
        >>> weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> loss = (3 * weight).sum()
        >>> reaches(loss, {weight}), reaches(loss, {other})
        (True, False)
    """
    visited, hidden = 0, False
    for node in walk(root.grad_fn):
        visited += 1
        hidden = hidden or _hides(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable in parameters:
            return True
    return hidden or visited > MAX_NODES


def _hides(node: Node) -> bool:
    """Whether a graph of its own can lie behind a node."""
    custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return custom and node.name() != "CompiledFunctionBackward"
