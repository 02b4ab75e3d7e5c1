"""Telling weights that are still as initialised from weights that have been trained."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from neuraldbg.capture.layers import RECURRENT, Layer
from neuraldbg.capture.local_shards import local_shard

SAMPLE = 16_384
"""Values looked at of each parameter: enough to tell the edge of a uniform distribution."""
_FEWEST = 32
_FEW = 512
_GAINS = (1.0, math.sqrt(2.0), 5.0 / 3.0)
"""Of linear layers, ReLU and tanh: `torch.nn.init.calculate_gain`."""
_ROUND_STDS = (0.01, 0.02, 0.05, 0.1, 1.0)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
_EDGE = 1.002
"""Half-precision numbers round, so a bound may be passed by that much."""


def sample_of(parameters: list[nn.Parameter]) -> Tensor:
    """An evenly spread sample of some parameters, flat, in memory of its own."""
    parts = []
    for parameter in parameters:
        flat = local_shard(parameter).detach().reshape(-1)
        parts.append(flat[:: max(-(-flat.numel() // SAMPLE), 1)].float())
    return torch.cat(parts).clone() if parts else torch.zeros(0)


def fans(layer: Layer) -> tuple[int, int]:
    """Inputs and outputs per unit of a layer's largest weight, as PyTorch's initialisers count.

    >>> from neuraldbg.capture.layers import find_layers
    >>> fans(find_layers([nn.Conv2d(3, 8, 5)])[0])
    (75, 200)
    """
    weight = layer.sampled_weight
    if isinstance(layer.module, RECURRENT):
        return layer.module.hidden_size, layer.module.hidden_size
    if weight.dim() < 2:
        return weight.numel(), weight.numel()
    field = math.prod(weight.shape[2:])
    return weight.shape[1] * field, weight.shape[0] * field


def is_norm(layer: Layer) -> bool:
    """Whether a layer normalises, so that its weights start as ones."""
    return isinstance(layer.module, _NORMS)


def norm_looks_fresh(weight: np.ndarray, bias: np.ndarray) -> float:
    """1 where a normalisation's scale is all ones and its shift all zeros, else 0.

    >>> norm_looks_fresh(np.ones(4), np.zeros(4)), norm_looks_fresh(np.full(4, 1.1), np.zeros(4))
    (1.0, 0.0)
    """
    return float(bool((weight == 1).all() and (bias == 0).all()))


def looks_fresh(weight: np.ndarray, bias: np.ndarray, fan_in: int, fan_out: int) -> float:
    """Whether weights look as a standard initialisation leaves them.

    Training blurs the sharp edge of a uniform distribution, moves biases off zero, and shifts the
    standard deviation; the usual initialisations (PyTorch's default, Glorot and Bengio 2010, He
    et al. 2015, normal with a round deviation) are told by edge or deviation.

    Args:
        weight: Sample of the weights, shape (values,).
        bias: Sample of the biases, shape (values,); empty where there are none.
        fan_in: Inputs per unit.
        fan_out: Outputs per unit.

    Returns:
        1 fresh, 0 trained, NaN where it cannot be told.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> weight = generator.uniform(-0.125, 0.125, 4096)
        >>> bias = generator.uniform(-0.125, 0.125, 64)
        >>> looks_fresh(weight, bias, 64, 64)
        1.0
        >>> looks_fresh(weight + generator.normal(0, 0.02, 4096), bias * 1.3, 64, 64)
        0.0
    """
    count = weight.size
    if count < _FEWEST or not np.isfinite(weight).all() or not weight.any():
        return math.nan
    default = 1.0 / math.sqrt(max(fan_in, 1))
    bias_zero = bool(bias.size) and not bias.any()
    bias_default = not bias.size or bias_zero or float(np.abs(bias).max()) <= default * _EDGE
    if not bias_default:
        return 0.0
    if bias_zero or _is_uniform(weight, _uniform_bounds(fan_in, fan_out)):
        return 1.0
    top, spread = float(np.abs(weight).max()), float(weight.std()) * math.sqrt(3.0)
    if abs(spread / default - 1.0) < 0.15 and default * _EDGE < top < 2.0 * default:
        return 0.0  # the default initialisation, its edges crossed
    if count >= _FEW and _is_normal(weight, _normal_stds(fan_in, fan_out)):
        return 1.0
    return math.nan


def _uniform_bounds(fan_in: int, fan_out: int) -> list[float]:
    by_fan = [g * math.sqrt(3.0 / n) for g in _GAINS for n in (fan_in, fan_out)]
    both = [g * math.sqrt(6.0 / (fan_in + fan_out)) for g in _GAINS]
    return [1.0 / math.sqrt(max(fan_in, 1)), *by_fan, *both]


def _normal_stds(fan_in: int, fan_out: int) -> list[float]:
    by_fan = [g / math.sqrt(n) for g in _GAINS for n in (fan_in, fan_out)]
    return [*by_fan, *(g * math.sqrt(2.0 / (fan_in + fan_out)) for g in _GAINS), *_ROUND_STDS]


def _is_uniform(weight: np.ndarray, bounds: list[float]) -> bool:
    """Whether values fill an interval around 0 evenly, up to a known bound or a sharp edge."""
    count, top = weight.size, float(np.abs(weight).max())
    # The root mean square of n uniform values is off by 0.45 / sqrt(n) of itself.
    even = top / (math.sqrt(3.0) * float(np.sqrt(np.square(weight).mean())))
    if abs(even - 1.0) > 2.0 / math.sqrt(count) + 5.0 / count:
        return False
    known = any(bound * (1.0 - 10.0 / count) <= top <= bound * _EDGE for bound in bounds)
    return known or count >= 1024


def _is_normal(weight: np.ndarray, stds: list[float]) -> bool:
    count, std = weight.size, float(weight.std())
    centred = (weight - weight.mean()) / std
    kurtosis = float(np.mean(centred**4)) - 3.0
    if abs(float(weight.mean())) > 4.5 * std / math.sqrt(count):
        return False
    if abs(kurtosis) > 5.0 * math.sqrt(24.0 / count):
        return False
    return any(abs(std / known - 1.0) < 2.5 / math.sqrt(count) for known in stds)
