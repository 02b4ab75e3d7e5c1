"""Which parameters a backward pass leads to, read from the autograd graph behind the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuraldbg.capture.graph_walk import MAX_NODES


@dataclass(frozen=True, slots=True)
class Reached:
    """The leaves of a graph.

    Attributes:
        leaves: Tensors that the backward pass accumulates a gradient into; not to be kept.
        complete: Whether the graph was walked to its end and hides nothing.
    """

    leaves: list[Tensor]
    complete: bool


def reached_leaves(roots: Sequence[Tensor], limit: int = MAX_NODES) -> Reached:
    """The leaves that a backward pass from some roots accumulates gradients into.

    Custom functions may run passes of their own that the graph does not show (reentrant
    checkpointing does): with one of them in it a graph does not count as complete.

    Args:
        roots: The tensors that `backward` is called on.
        limit: Nodes visited at most.

    Example:
        >>> weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> found = reached_leaves([(3 * weight).sum() + other.detach().sum()])
        >>> len(found.leaves), found.leaves[0] is weight, found.complete
        (1, True, True)
    """
    queue: deque[Any] = deque(root.grad_fn for root in roots if root.grad_fn is not None)
    leaves = {id(root): root for root in roots if root.is_leaf and root.requires_grad}
    seen: set[Any] = set(queue)
    visited, hidden = 0, False
    while queue and visited < limit:
        visited += 1
        node = queue.popleft()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
            continue
        hidden = hidden or isinstance(node, torch.autograd.function.BackwardCFunction)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return Reached(list(leaves.values()), not queue and not hidden)
