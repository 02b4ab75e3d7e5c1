"""Networks for sequences of vectors or tokens: recurrent ones and a transformer encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .activations import ACTIVATION_FUNCTIONS


class RecurrentClassifier(nn.Module):
    """One recurrent layer of 48 units; its last state feeds a linear head.

    Args:
        recurrence: nn.RNN, nn.LSTM or nn.GRU.
        features: features of a step, or the size of the vocabulary.
        outputs: classes, or the values to regress.
        tokens: whether the steps are token numbers, which are embedded first.
    """

    def __init__(
        self,
        recurrence: type[nn.RNN | nn.LSTM | nn.GRU],
        features: int,
        outputs: int,
        tokens: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(features, 24) if tokens else None
        self.recurrence = recurrence(24 if tokens else features, 48, batch_first=True)
        self.head = nn.Linear(48, outputs)

    def forward(self, steps: Tensor) -> Tensor:
        """Map sequences to logits or values."""
        vectors = steps if self.embedding is None else self.embedding(steps)
        states, _ = self.recurrence(vectors)
        result: Tensor = self.head(states[:, -1])
        return result

    def activated_layers(self) -> list[nn.Module]:
        """The recurrent layer, which holds its own tanh and gates."""
        return [self.recurrence]


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, each with the way around it."""

    def __init__(self, width: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feedforward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.activation = ACTIVATION_FUNCTIONS[activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Let the positions look at each other, then transform each."""
        normed = self.attention_norm(hidden)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        hidden = hidden + self.dropout(attended)
        expanded = self.activation(self.expand(self.feedforward_norm(hidden)))
        contribution: Tensor = self.dropout(self.contract(expanded))
        return hidden + contribution


class TransformerClassifier(nn.Module):
    """Two encoder blocks of width 32 with learned positions; the mean feeds a linear head.

    Args:
        length: positions of a sequence.
        features: features of a step, or the size of the vocabulary.
        outputs: classes, or the values to regress.
        activation: what the feed-forward parts use.
        tokens: whether the steps are token numbers, which are embedded.
        dropout: probability with which a block's contributions are dropped.
    """

    def __init__(
        self,
        length: int,
        features: int,
        outputs: int,
        activation: str,
        tokens: bool,
        dropout: float = 0.05,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(features, 32) if tokens else nn.Linear(features, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(length, 32))
        self.blocks = nn.ModuleList(EncoderBlock(32, activation, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, outputs)

    def forward(self, steps: Tensor) -> Tensor:
        """Map sequences to logits or values."""
        hidden = self.embedding(steps) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(self.norm(hidden).mean(dim=1))
        return result

    def activated_layers(self) -> list[nn.Module]:
        """The first feed-forward layer of every block."""
        return [block.expand for block in self.blocks if isinstance(block, EncoderBlock)]
