"""The tasks that networks are trained for: the loss, and how far a model is from solving them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenCrossEntropy(nn.Module):
    """Cross-entropy of every position of a sequence, averaged.

    Example:
        >>> logits, targets = torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)
        >>> round(TokenCrossEntropy()(logits, targets).item(), 4)  # log 7
        1.9459
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, of logits (batch, length, classes) and classes (batch, length)."""
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NegativeElbo(nn.Module):
    """Squared error of a reconstruction and the divergence of its code (Kingma, Welling 2014).

    Attributes:
        weight: of the divergence, per value of the sample.
    """

    def __init__(self, weight: float = 1e-3) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        """The loss, of (reconstruction, mean, log variance) and what was to be reconstructed."""
        reconstruction, mean, log_variance = output
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
        error = functional.mse_loss(reconstruction, targets)
        return error + self.weight * divergence.sum(1).mean()


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of a network.

    Attributes:
        loss: makes the usual loss function.
        error: how wrong an output is: 0 for perfect, 1 for no better than a constant.
        labelled: whether the targets are classes.
    """

    loss: Callable[[], nn.Module]
    error: Callable[[Any, Tensor], float]
    labelled: bool


def balanced_error(logits: Tensor, targets: Tensor) -> float:
    """Share of wrong answers, every class counting alike, over that of a constant answer.

    Args:
        logits: of shape (..., classes).
        targets: classes, of shape (...).

    Example:
        >>> logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
        >>> balanced_error(logits, torch.tensor([0, 0, 1, 1]))
        0.5
    """
    truth = targets.flatten()
    right = (logits.flatten(0, -2).argmax(-1) == truth).double()
    classes = truth.unique()  # type: ignore[no-untyped-call]
    if len(classes) < 2:
        return 1.0 - float(right.mean())
    recalls = torch.stack([right[truth == label].mean() for label in classes])
    return float(1.0 - recalls.mean()) / (1.0 - 1.0 / len(classes))


def unexplained_variance(output: Tensor, targets: Tensor) -> float:
    """Mean squared error over the targets' variance; infinite where it is no number.

    Example:
        >>> unexplained_variance(torch.zeros(4), torch.tensor([-1.0, 1.0, -1.0, 1.0]))
        1.0
    """
    truth = targets.double()
    residual = output.double().reshape(truth.shape) - truth
    variance = (truth - truth.mean(0)).square().mean()
    error = float(residual.square().mean() / variance)
    return error if error == error else float("inf")


def _reconstruction_error(output: Tensor | tuple[Tensor, ...], targets: Tensor) -> float:
    first = output if isinstance(output, Tensor) else output[0]
    return unexplained_variance(first.flatten(1), targets.flatten(1))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "classification": Task(nn.CrossEntropyLoss, balanced_error, labelled=True),
        "regression": Task(nn.MSELoss, unexplained_variance, labelled=False),
        "language": Task(TokenCrossEntropy, balanced_error, labelled=True),
        "reconstruction": Task(nn.MSELoss, _reconstruction_error, labelled=False),
        "generation": Task(NegativeElbo, _reconstruction_error, labelled=False),
    }
)
"""Tasks by name."""
