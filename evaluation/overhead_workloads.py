"""The networks on which the cost of capture is measured, and loops that train them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and one batch for it."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Loop:
    """A model that trains on one batch.

    Attributes:
        model: As `NeuralDbg` is given it.
        step: One optimizer step.
    """

    model: nn.Module
    step: Callable[[], None]


def training_loop(workload: Workload, compiled: bool = False) -> Loop:
    """A loop of plain SGD over one batch, the same weights and data each time.

    Args:
        workload: What to train.
        compiled: Whether the model goes through `torch.compile`.
    """
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = workload.make_batch()
    if compiled:
        model.compile(fullgraph=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Loop(model, step)


class _SequenceClassifier(nn.Module):
    """A 4-layer transformer encoder of width 256 over 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, time, 32) to logits of shape (batch, 10)."""
        logits: Tensor = self.head(self.encoder(self.embed(inputs)).mean(dim=1))
        return logits


def mlp(layers: int = 5, width: int = 256) -> nn.Module:
    """A plain perceptron with ReLU, 64 inputs and 10 outputs."""
    modules: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(layers - 1):
        modules += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def random_batch(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that makes a batch of noise of this shape, and labels of ten classes."""
    return lambda: (torch.randn(*shape), torch.randint(10, shape[:1]))


WORKLOADS: Mapping[str, Workload] = {
    "MLP 5x256, batch 64": Workload(mlp, random_batch(64, 64)),
    "CNN 32x32, batch 32": Workload(_cnn, random_batch(32, 3, 32, 32)),
    "transformer 4x256, batch 8": Workload(_SequenceClassifier, random_batch(8, 32, 32)),
}
