"""Data made from a seed, in the awkward units that real sensors and files have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLES = 1024
"""Samples of every generated data set."""

VOCABULARY = 16
"""Different tokens in a token sequence."""


def textures(seed: int) -> tuple[Tensor, Tensor]:
    """Colour images of 12x12 bytes: stripes whose direction is the class, one of six.

    Example:
        >>> images, labels = textures(seed=0)
        >>> tuple(images.shape), bool(images.min() >= 0), bool(images.max() <= 255)
        ((1024, 3, 12, 12), True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (SAMPLES,), generator=generator)
    angle = (labels * (math.pi / 6)).reshape(-1, 1, 1)
    rows = torch.arange(12.0).reshape(1, 12, 1)
    columns = torch.arange(12.0).reshape(1, 1, 12)
    phase = 2 * math.pi * torch.rand(SAMPLES, 1, 1, generator=generator)
    stripes = torch.sin(1.6 * (rows * torch.sin(angle) + columns * torch.cos(angle)) + phase)
    colour = 0.5 + 0.5 * torch.rand(SAMPLES, 3, 1, 1, generator=generator)
    noise = 0.4 * torch.randn(SAMPLES, 3, 12, 12, generator=generator)
    images = 128 + 60 * (colour * stripes.unsqueeze(1) + noise)
    return images.clamp(0, 255), labels


def tones(seed: int) -> tuple[Tensor, Tensor]:
    """Waves of 24 samples in millivolts; the class is the frequency, one of four.

    Example:
        >>> waves, labels = tones(seed=0)
        >>> tuple(waves.shape), sorted(set(labels.tolist()))
        ((1024, 24, 1), [0, 1, 2, 3])
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    frequency = torch.tensor([0.3, 0.65, 1.15, 1.9])[labels].reshape(-1, 1)
    phase = 2 * math.pi * torch.rand(SAMPLES, 1, generator=generator)
    waves = torch.sin(frequency * torch.arange(24.0) + phase)
    noise = 0.2 * torch.randn(SAMPLES, 24, generator=generator)
    return (120 + 40 * (waves + noise)).unsqueeze(-1), labels


def gestures(seed: int) -> tuple[Tensor, Tensor]:
    """Three sensors over 16 steps; the class is the order in which two of them are touched.

    Example:
        >>> sensors, labels = gestures(seed=0)
        >>> tuple(sensors.shape), int(labels.max()) + 1
        ((1024, 16, 3), 6)
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (SAMPLES,), generator=generator)
    orders = torch.tensor([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])[labels]
    early = torch.randint(1, 7, (SAMPLES,), generator=generator)
    late = torch.randint(8, 14, (SAMPLES,), generator=generator)
    sensors = 0.25 * torch.randn(SAMPLES, 16, 3, generator=generator)
    everyone = torch.arange(SAMPLES)
    for moment, sensor in ((early, orders[:, 0]), (late, orders[:, 1])):
        sensors[everyone, moment, sensor] += 2.0
        sensors[everyone, moment + 1, sensor] += 2.0
    return sensors * torch.tensor([3.0, 40.0, 500.0]) + torch.tensor([10.0, 100.0, 0.0]), labels


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """Sequences of 12 tokens; the class is which of four marker tokens is in it most often.

    Example:
        >>> sequences, labels = tokens(seed=0)
        >>> tuple(sequences.shape), sequences.dtype
        ((1024, 12), torch.int64)
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    sequences = torch.randint(4, VOCABULARY, (SAMPLES, 12), generator=generator)
    places = torch.rand(SAMPLES, 12, generator=generator).argsort(dim=1)
    sequences.scatter_(1, places[:, :3], labels.reshape(-1, 1).expand(-1, 3))
    distractor = torch.randint(4, (SAMPLES, 1), generator=generator)
    sequences.scatter_(1, places[:, 3:4], distractor)
    return sequences, labels


def spirals(seed: int) -> tuple[Tensor, Tensor]:
    """Points on three arms of a spiral, in millimetres from a corner.

    Example:
        >>> tuple(spirals(seed=0)[0].shape)
        (1024, 2)
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    radius = 0.15 + 0.85 * torch.rand(SAMPLES, generator=generator)
    angle = labels * (2 * math.pi / 3) + 3.5 * radius
    points = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
    noise = 0.04 * torch.randn(SAMPLES, 2, generator=generator)
    return 300 + 150 * (points + noise), labels


def surface(seed: int) -> tuple[Tensor, Tensor]:
    """A smooth function of six quantities in unlike units, with a little noise.

    Example:
        >>> inputs, values = surface(seed=0)
        >>> tuple(inputs.shape), tuple(values.shape)
        ((1024, 6), (1024, 1))
    """
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(SAMPLES, 6, generator=generator)
    values = (
        torch.sin(math.pi * unit[:, 0] * unit[:, 1])
        + 2 * (unit[:, 2] - 0.5) ** 2
        + unit[:, 3]
        + 0.5 * unit[:, 4]
        + 0.05 * torch.randn(SAMPLES, generator=generator)
    )
    units = torch.tensor([1.0, 1.0, 20.0, 100.0, 300.0, 1000.0])
    return unit * units, 50 + 20 * values.unsqueeze(1)
