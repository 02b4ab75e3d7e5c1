"""Prediction and target of unlike shapes that broadcast against each other in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from neuraldbg.capture.graph_walk import Node, first_child, shape_of
from neuraldbg.capture.loss_head import LossTerm

_HEAD_NODES = 64
_ELEMENTWISE = ("SubBackward0", "MulBackward0", "DivBackward0", "AddBackward0")
_LOSS_NODES = (
    "MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "NegBackward0",
    "PowBackward0", "AbsBackward0", "SqrtBackward0", "LogBackward0", "MulBackward0",
    "DivBackward0", "AddBackward0", "SubBackward0", "WhereBackward0", "HuberLossBackward0",
    "SmoothL1LossBackward0", "MseLossBackward0",
)  # fmt: skip
"""What a loss is made of: below anything else lies the model."""


def find_broadcast(loss: Tensor, terms: Sequence[LossTerm]) -> str | None:
    """The shapes of a prediction and the result in which it met every target, None if it did not.

    That is a prediction of N values whose comparison with N targets has N x N values, as of
    (N, 1) with (N,). Broadcasting a scale or a bias, or one prediction against several targets of
    its sample, is ordinary, and so is a comparison of all pairs that a program asks for by
    `unsqueeze` or indexing with None.

    Args:
        loss: The tensor that `backward` is called on.
        terms: The loss functions at its head.

    Example:
        >>> import torch
        >>> output = torch.nn.Linear(3, 1)(torch.ones(5, 3))
        >>> find_broadcast(((output - torch.ones(5)) ** 2).mean(), [])
        '(5, 1) became (5, 5)'
        >>> find_broadcast(((output - torch.ones(5, 1)) ** 2).mean(), [])
    """
    for term in terms:
        found = _expanded(term)
        if found is not None:
            return found
    for node in _head(loss):
        if node.name() in _ELEMENTWISE:
            found = _met_all(node)
            if found is not None:
                return found
    return None


def _head(loss: Tensor) -> Iterator[Node]:
    """The nodes that make up the loss, those nearest the root first."""
    queue = [loss.grad_fn]
    for _ in range(_HEAD_NODES):
        if not queue:
            return
        node = queue.pop(0)
        if node is not None and node.name() in _LOSS_NODES:
            yield node
            queue += [child for child, _ in node.next_functions]


def _expanded(term: LossTerm) -> str | None:
    """Of a library function, which expands both before it compares them."""
    target, node = term.target, term.output
    if target is None or node is None or node.name() != "ExpandBackward0":
        return None
    if not any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    ):
        return None
    return _growth(tuple(node._saved_self_sym_sizes), tuple(target.shape))


def _met_all(node: Node) -> str | None:
    """Of an operation between a result of the graph and a constant."""
    operands = [child for child, _ in node.next_functions if child is not None]
    result = shape_of(node)
    if len(operands) != 1 or result is None:
        return None
    operand = operands[0]
    if operand.name() == "ExpandBackward0":
        below = first_child(operand)
        shape: tuple[int, ...] | None = tuple(operand._saved_self_sym_sizes)
        if below is not None and below.name() == "UnsqueezeBackward0":
            return None
    else:
        shape = shape_of(operand)
    if shape is None or operand.name() == "UnsqueezeBackward0":
        return None
    return _growth(shape, result)


def _growth(before: tuple[int, ...], after: tuple[int, ...]) -> str | None:
    sizes = [size for size in before if size != 1]
    if len(sizes) == 1 and [size for size in after if size != 1] == 2 * sizes:
        return f"{before} became {after}"
    return None
