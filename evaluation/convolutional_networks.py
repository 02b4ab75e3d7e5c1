"""Convolutional networks for small images: plain, with batch norm, and deep."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from .activations import ACTIVATION_FUNCTIONS, ACTIVATION_MODULES
from .feedforward_networks import preserve_variance


def plain_cnn(
    channels: int, height: int, width: int, outputs: int, activation: str
) -> nn.Sequential:
    """Two convolutions with pooling, one hidden linear layer, activation modules."""
    act = ACTIVATION_MODULES[activation]
    return nn.Sequential(
        nn.Conv2d(channels, 12, 3, padding=1),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24 * (height // 4) * (width // 4), 48),
        act(),
        nn.Linear(48, outputs),
    )


def batchnorm_cnn(channels: int, outputs: int, activation: str) -> nn.Sequential:
    """Three convolutions with batch norm and global average pooling, activation modules."""
    act = ACTIVATION_MODULES[activation]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        act(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24),
        act(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        act(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, outputs),
    )


class DeepCnn(nn.Module):
    """Nine plain 3x3 convolutions of 12 channels; the activation is a function call."""

    def __init__(self, channels: int, outputs: int, activation: str) -> None:
        super().__init__()
        widths = [channels] + [12] * 9
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2 if index == 1 else 1, padding=1)
            for index, (before, after) in enumerate(pairwise(widths))
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(12 * 4, outputs)
        self.activation = ACTIVATION_FUNCTIONS[activation]
        for convolution in self.convolutions:
            preserve_variance(convolution, activation)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits or values."""
        hidden = images
        for convolution in self.convolutions:
            hidden = self.activation(convolution(hidden))
        result: Tensor = self.head(self.pool(hidden).flatten(1))
        return result

    def activated_layers(self) -> list[nn.Module]:
        """All convolutions."""
        return list(self.convolutions)
