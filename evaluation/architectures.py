"""The registry of small networks that programs are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn

from .convolutional_networks import DeepCnn, batchnorm_cnn, plain_cnn
from .feedforward_networks import DeepMlp, ResidualMlp, plain_mlp
from .sequence_networks import RecurrentClassifier, TransformerClassifier

InputKind = Literal["vector", "image", "sequence", "tokens"]

ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu")
"""Activation functions that a recipe may ask for."""


@dataclass(frozen=True, slots=True)
class DataShape:
    """The shape of one sample.

    Attributes:
        kind: what a sample is.
        size: features of a vector; channels, height and width of an image; length and features
            of a sequence; length and vocabulary of a token sequence.

    Example:
        >>> DataShape("image", (1, 8, 8)).values
        64
    """

    kind: InputKind
    size: tuple[int, ...]

    @property
    def values(self) -> int:
        """Numbers in one sample."""
        if self.kind == "tokens":
            return self.size[0]
        product = 1
        for extent in self.size:
            product *= extent
        return product


Factory = Callable[[DataShape, int, str, float], nn.Module]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry of the registry.

    Attributes:
        name: the key of the registry.
        family: networks of one family share their failures; splits hold out whole families.
        factory: makes the network from the shape of a sample, the outputs, the activation and
            the probability of dropout.
        kinds: the kinds of sample it takes.
        activations: what may be asked for, the usual choice first.
        normalised: whether batch or layer norms keep its activations in scale.
        shortcuts: whether the signal has ways around its activations.
        drops: whether it has dropout layers.
        plain_and_deep: eight hidden layers or more without a way around them.
    """

    name: str
    family: str
    factory: Factory
    kinds: tuple[InputKind, ...]
    activations: tuple[str, ...]
    normalised: bool = False
    shortcuts: bool = False
    drops: bool = False
    plain_and_deep: bool = False


def _mlp(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return plain_mlp(inputs.values, outputs, activation, dropout)


def _residual_mlp(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return ResidualMlp(inputs.values, outputs, activation)


def _deep_mlp(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return DeepMlp(inputs.values, outputs, activation)


def _cnn(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    channels, height, width = inputs.size
    return plain_cnn(channels, height, width, outputs, activation)


def _cnn_batchnorm(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return batchnorm_cnn(inputs.size[0], outputs, activation)


def _deep_cnn(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return DeepCnn(inputs.size[0], outputs, activation)


def _rnn(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return RecurrentClassifier(nn.RNN, inputs.size[1], outputs, inputs.kind == "tokens")


def _lstm(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return RecurrentClassifier(nn.LSTM, inputs.size[1], outputs, inputs.kind == "tokens")


def _gru(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    return RecurrentClassifier(nn.GRU, inputs.size[1], outputs, inputs.kind == "tokens")


def _transformer(inputs: DataShape, outputs: int, activation: str, dropout: float) -> nn.Module:
    length, features = inputs.size
    tokens = inputs.kind == "tokens"
    return TransformerClassifier(length, features, outputs, activation, tokens, dropout)


_FLAT: tuple[InputKind, ...] = ("vector", "image", "sequence")
_ORDERED: tuple[InputKind, ...] = ("sequence", "tokens")

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Architecture("mlp", "mlp", _mlp, _FLAT, ACTIVATIONS, drops=True),
            Architecture(
                "residual_mlp",
                "residual_mlp",
                _residual_mlp,
                _FLAT,
                ("relu", "gelu", "tanh"),
                normalised=True,
                shortcuts=True,
            ),
            Architecture("deep_mlp", "mlp", _deep_mlp, _FLAT, ACTIVATIONS, plain_and_deep=True),
            Architecture("cnn", "cnn", _cnn, ("image",), ACTIVATIONS),
            Architecture(
                "cnn_batchnorm",
                "cnn_batchnorm",
                _cnn_batchnorm,
                ("image",),
                ("relu", "gelu"),
                normalised=True,
            ),
            Architecture(
                "deep_cnn", "cnn", _deep_cnn, ("image",), ACTIVATIONS, plain_and_deep=True
            ),
            Architecture("rnn", "rnn", _rnn, _ORDERED, ("tanh",)),
            Architecture("lstm", "gated_rnn", _lstm, _ORDERED, ("tanh",)),
            Architecture("gru", "gated_rnn", _gru, _ORDERED, ("tanh",)),
            Architecture(
                "transformer",
                "transformer",
                _transformer,
                _ORDERED,
                ("gelu", "relu"),
                normalised=True,
                shortcuts=True,
                drops=True,
            ),
        )
    }
)
"""All architectures by name."""


def find_architecture(name: str) -> Architecture:
    """The architecture of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.

    Example:
        >>> find_architecture("lstm").family
        'gated_rnn'
        >>> find_architecture("ltsm")
        Traceback (most recent call last):
        ...
        ValueError: no architecture 'ltsm'; choose from mlp, residual_mlp, deep_mlp, cnn, \
cnn_batchnorm, deep_cnn, rnn, lstm, gru, transformer
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"no architecture {name!r}; choose from {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def build_architecture(
    name: str,
    inputs: DataShape,
    outputs: int,
    activation: str | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """Make a network with fresh random weights from torch's global generator.

    Args:
        name: an architecture of the registry.
        inputs: the shape of one sample.
        outputs: classes, or the values to regress.
        activation: None takes the architecture's usual one.
        dropout: probability with which hidden values are dropped.

    Raises:
        ValueError: the name, kind of input, activation or a dropout is not among the choices.

    Example:
        >>> build_architecture("cnn", DataShape("vector", (30,)), 2)
        Traceback (most recent call last):
        ...
        ValueError: architecture 'cnn' takes image samples, not vector
    """
    architecture = find_architecture(name)
    if inputs.kind not in architecture.kinds:
        kinds = ", ".join(architecture.kinds)
        raise ValueError(f"architecture {name!r} takes {kinds} samples, not {inputs.kind}")
    chosen = activation or architecture.activations[0]
    if chosen not in architecture.activations:
        choices = ", ".join(architecture.activations)
        raise ValueError(f"no activation {chosen!r} in {name!r}; choose from {choices}")
    if dropout and not architecture.drops:
        able = ", ".join(entry.name for entry in ARCHITECTURES.values() if entry.drops)
        raise ValueError(f"{name!r} has no dropout; choose from {able}")
    return architecture.factory(inputs, outputs, chosen, dropout)
