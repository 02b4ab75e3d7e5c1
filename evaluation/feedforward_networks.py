"""Fully connected networks: plain, residual and deep."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from .activations import ACTIVATION_FUNCTIONS, ACTIVATION_MODULES


def plain_mlp(features: int, outputs: int, activation: str, dropout: float = 0.0) -> nn.Sequential:
    """Two hidden layers of 64 units with activation modules and PyTorch's default weights."""
    dropped = [nn.Dropout(dropout)] if dropout else []
    act = ACTIVATION_MODULES[activation]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, 64),
        act(),
        *dropped,
        nn.Linear(64, 64),
        act(),
        *dropped,
        nn.Linear(64, outputs),
    )


class ResidualBlock(nn.Module):
    """Layer norm, two linear layers and the way around them."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.activation = ACTIVATION_FUNCTIONS[activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the block's contribution to its input."""
        contribution: Tensor = self.contract(self.activation(self.expand(self.norm(hidden))))
        return hidden + contribution


class ResidualMlp(nn.Module):
    """Four residual blocks of width 48; the activation is a function call."""

    def __init__(self, features: int, outputs: int, activation: str) -> None:
        super().__init__()
        self.stem = nn.Linear(features, 48)
        self.blocks = nn.ModuleList(ResidualBlock(48, activation) for _ in range(4))
        self.head = nn.Linear(48, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map samples to logits or values."""
        hidden = self.stem(inputs.flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(hidden)
        return result

    def activated_layers(self) -> list[nn.Module]:
        """The first linear layer of every block."""
        return [block.expand for block in self.blocks if isinstance(block, ResidualBlock)]


class DeepMlp(nn.Module):
    """Ten plain hidden layers of 48 units, variance-preserving weights, activation as a function.

    Example:
        >>> len(DeepMlp(4, 2, "tanh").layers)
        10
    """

    def __init__(self, features: int, outputs: int, activation: str) -> None:
        super().__init__()
        widths = [features] + [48] * 10
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.head = nn.Linear(48, outputs)
        self.activation = ACTIVATION_FUNCTIONS[activation]
        for layer in self.layers:
            preserve_variance(layer, activation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map samples to logits or values."""
        hidden = inputs.flatten(1)
        for layer in self.layers:
            hidden = self.activation(layer(hidden))
        result: Tensor = self.head(hidden)
        return result

    def activated_layers(self) -> list[nn.Module]:
        """All hidden layers."""
        return list(self.layers)


def preserve_variance(layer: nn.Module, activation: str) -> None:
    """Initialise by He's rule before ReLU and GELU, by Glorot's before the others; bias zero."""
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    if activation in ("relu", "gelu"):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    else:
        nn.init.xavier_normal_(layer.weight, gain=5 / 3 if activation == "tanh" else 1.0)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
