"""The constant that a loss is multiplied by before its backward pass, read from the graph."""

from __future__ import annotations

import math

from torch import Tensor

from neuraldbg.capture.graph_walk import VIEWS, Node, first_child, shape_of, walk

_DEEPEST = 12
"""Nodes between the root and the loss function."""
_SIGNATURE_NODES = 48
_SUM_REDUCTION = 2


def loss_factor(loss: Tensor, scale: Tensor | None = None) -> float:
    """What the mean loss is multiplied by at the head of the graph; of several terms the least.

    A sum counts as its mean times the number of values, so that a sum divided by their number has
    the factor 1.

    Args:
        loss: The tensor that `backward` is called on.
        scale: A scale for mixed precision, which does not count.

    Returns:
        The factor, NaN where it cannot be told.

    Example:
        >>> import torch
        >>> weight = torch.ones(6, requires_grad=True)
        >>> loss_factor((weight**2).mean() / 4), loss_factor(3 * ((weight**2).sum() / 6))
        (0.25, 3.0)
    """
    return _factor(loss.grad_fn, scale, 0)


def _factor(node: Node | None, scale: Tensor | None, depth: int) -> float:
    if node is None or depth > _DEEPEST:
        return math.nan
    name = node.name()
    child = first_child(node)
    if name in ("AddBackward0", "SubBackward0"):
        branches = [inner for inner, _ in node.next_functions if inner is not None]
        known = [_factor(inner, scale, depth + 1) for inner in branches]
        return min((factor for factor in known if not math.isnan(factor)), default=math.nan)
    if name in ("MulBackward0", "DivBackward0"):
        number = _operand(node, scale)
        if number is None:
            return 1.0
        below = _factor(child, scale, depth + 1)
        return below * abs(number) if name == "MulBackward0" else below / max(abs(number), 1e-30)
    if name == "NegBackward0" or (name in VIEWS and shape_of(node) in ((), (1,))):
        return _factor(child, scale, depth + 1)
    return _values_summed(node, child)


def _operand(node: Node, scale: Tensor | None) -> float | None:
    """The constant operand of a product or quotient of single numbers, None if there is none."""
    children = [inner for inner, _ in node.next_functions if inner is not None]
    if len(children) != 1 or shape_of(node) not in ((), (1,)):
        return None
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None)
    if not isinstance(other, Tensor):
        return float(other) if isinstance(other, (int, float)) else None
    if scale is not None and other.data_ptr() == scale.data_ptr():
        return 1.0
    if not other.is_cpu or other.numel() != 1:
        return None if other.numel() != 1 else math.nan
    return float(other)


def _values_summed(node: Node, child: Node | None) -> float:
    """How many values a reduction adds up for each value it averages over: 1 for a mean."""
    if node.name() == "SumBackward0" and child is not None:
        shape = shape_of(child)
        return math.nan if shape is None else float(math.prod(shape))
    if getattr(node, "_saved_reduction", None) == _SUM_REDUCTION:
        target = getattr(node, "_saved_target", None)
        return float(target.numel()) if isinstance(target, Tensor) else math.nan
    return 1.0


def graph_signature(loss: Tensor) -> tuple[str, ...]:
    """What tells the losses of different kinds apart: the operations near the root.

    Example:
        >>> import torch
        >>> weight = torch.ones(6, requires_grad=True)
        >>> graph_signature((2 * weight).mean())
        ('MeanBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad')
    """
    return tuple(node.name() for node in walk(loss.grad_fn, _SIGNATURE_NODES))
