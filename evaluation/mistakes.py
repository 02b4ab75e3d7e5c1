"""The single steps that faults put into a recipe, each written as a person would write it.

They are small frozen records with a call, so that recipes can be compared, printed and sent to
worker processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .activations import activated_layers


def weight_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that mix features by weights of their own, in the order of registration.

    Norms and embeddings are not among them; attention is one layer.

    Example:
        >>> weight_layers(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1)))[-1]
        Linear(in_features=3, out_features=1, bias=True)
    """
    kinds = (nn.Linear, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
    return [layer for layer in model.modules() if isinstance(layer, kinds)]


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    """The weight matrices and kernels that a layer holds itself."""
    return [weight for weight in layer.parameters(recurse=False) if weight.dim() >= 2]


@dataclass(frozen=True, slots=True)
class NormalWeights:
    """Draw every weight from N(0, deviation)."""

    deviation: float

    def __call__(self, model: nn.Module) -> None:
        """Change the model's weights."""
        for layer in weight_layers(model):
            for weight in weights_of(layer):
                nn.init.normal_(weight, std=self.deviation)


@dataclass(frozen=True, slots=True)
class ConstantWeights:
    """Give every weight of the first layers the same value, and every bias zero.

    Attributes:
        value: of the weights.
        share: share of the layers, from the input side.
    """

    value: float
    share: float = 1.0

    def __call__(self, model: nn.Module) -> None:
        """Change the model's weights."""
        layers = weight_layers(model)
        for layer in layers[: math.ceil(self.share * len(layers))]:
            for parameter in layer.parameters(recurse=False):
                nn.init.constant_(parameter, self.value if parameter.dim() >= 2 else 0.0)


@dataclass(frozen=True, slots=True)
class ScaleHiddenWeights:
    """Multiply the weights of the layers that feed an activation."""

    factor: float

    def __call__(self, model: nn.Module) -> None:
        """Change the model's weights."""
        with torch.no_grad():
            for layer in activated_layers(model):
                for weight in weights_of(layer):
                    weight.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class FillActivatedBiases:
    """Set the bias of every layer that feeds an activation; of a recurrence, its input bias."""

    value: float

    def __call__(self, model: nn.Module) -> None:
        """Change the model's biases."""
        for layer in activated_layers(model):
            for name, parameter in layer.named_parameters(recurse=False):
                if name == "bias" or name.startswith("bias_ih"):
                    nn.init.constant_(parameter, self.value)


@dataclass(frozen=True, slots=True)
class HoldLastLayers:
    """Hand the optimizer the parameters of the last layers only.

    Attributes:
        missed: share of the layers before the head that it never sees.
    """

    missed: float = 1.0

    def __call__(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that the optimizer is given."""
        layers = [layer for layer in model.modules() if [*layer.parameters(recurse=False)]]
        first_held = math.ceil(self.missed * (len(layers) - 1))
        return [p for layer in layers[first_held:] for p in layer.parameters(recurse=False)]


@dataclass(frozen=True, slots=True)
class ScaleInputs:
    """Multiply the inputs: other units, otherwise as they are."""

    factor: float

    def __call__(self, _step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch with its inputs scaled."""
        return inputs * self.factor, targets


@dataclass(frozen=True, slots=True)
class PoisonOneSample:
    """Put NaN into the first values of one sample of one batch.

    Attributes:
        step: the batch.
        share: share of the sample's values, one value at least.
    """

    step: int
    share: float = 0.0

    def __call__(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch, poisoned when its turn has come."""
        if step != self.step:
            return inputs, targets
        inputs = inputs.clone()
        sample = inputs[len(inputs) // 2].flatten()
        sample[: max(1, round(self.share * len(sample)))] = torch.nan
        inputs[len(inputs) // 2] = sample.view(inputs.shape[1:])
        return inputs, targets
