"""The registry of data sets, real and generated, standardised as a careful person would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from . import generated_data, measured_data
from .architectures import DataShape, InputKind

TaskName = Literal["classification", "regression", "language", "reconstruction", "generation"]
"""A name in ``TASKS``."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples ready to train on.

    Attributes:
        name: the key of the registry.
        task: what is asked of a network.
        outputs: classes, or the values to regress.
        shape: the shape of one sample.
        inputs: standardised samples, or token numbers.
        raw_inputs: the samples in the units they were measured or stored in.
        targets: class numbers, or standardised values of shape (samples, outputs).
    """

    name: str
    task: TaskName
    outputs: int
    shape: DataShape
    inputs: Tensor
    raw_inputs: Tensor
    targets: Tensor

    def training(self, seed: int, standardised: bool = True) -> Batch:
        """Four fifths of the samples, drawn by the seed: those to train on.

        Args:
            seed: fixes which.
            standardised: False gives the raw inputs.

        Example:
            >>> wine = load_dataset("wine")
            >>> [len(part(seed=0)[1]) for part in (wine.training, wine.held_out)]
            [142, 36]
        """
        return self._part(slice(None, self._trained_on), seed, standardised)

    def held_out(self, seed: int, standardised: bool = True) -> Batch:
        """The other fifth."""
        return self._part(slice(self._trained_on, None), seed, standardised)

    @property
    def _trained_on(self) -> int:
        return round(0.8 * len(self.inputs))

    def _part(self, part: slice, seed: int, standardised: bool) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.inputs), generator=generator)[part]
        inputs = self.inputs if standardised else self.raw_inputs
        return inputs[chosen], self.targets[chosen]


def draw_batches(
    samples: Batch, batch_size: int, steps: int, generator: torch.Generator, shuffled: bool = True
) -> list[Batch]:
    """Draw batches epoch by epoch, each epoch in a new order, short last batches dropped.

    Args:
        samples: inputs and targets.
        batch_size: samples of a batch, at most all.
        steps: batches to draw.
        generator: gives the order.
        shuffled: False keeps the samples in the order they have.

    Example:
        >>> samples = torch.arange(5.0), torch.arange(5)
        >>> [x.tolist() for x, _ in draw_batches(samples, 2, 3, torch.Generator(), shuffled=False)]
        [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]]
    """
    inputs, targets = samples
    count = len(inputs)
    size = min(batch_size, count)
    batches: list[Batch] = []
    while len(batches) < steps:
        order = torch.randperm(count, generator=generator) if shuffled else torch.arange(count)
        for start in range(0, count - size + 1, size):
            chosen = order[start : start + size]
            batches.append((inputs[chosen], targets[chosen]))
    return batches[:steps]


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """How a data set is obtained.

    Attributes:
        make: gives raw inputs and targets from a seed.
        kind: what a sample is.
        task: what is asked of a network.
        per_feature: whether features have units of their own, so that each is standardised alone.
    """

    make: Callable[[int], Batch]
    kind: InputKind
    task: TaskName
    per_feature: bool = False


DATASETS: Mapping[str, DatasetSource] = MappingProxyType(
    {
        "digits": DatasetSource(measured_data.digits, "vector", "classification"),
        "digits_images": DatasetSource(measured_data.digits_images, "image", "classification"),
        "digits_rows": DatasetSource(measured_data.digits_rows, "sequence", "classification"),
        "breast_cancer": DatasetSource(
            measured_data.breast_cancer, "vector", "classification", per_feature=True
        ),
        "wine": DatasetSource(measured_data.wine, "vector", "classification", per_feature=True),
        "diabetes": DatasetSource(measured_data.diabetes, "vector", "regression", per_feature=True),
        "textures": DatasetSource(generated_data.textures, "image", "classification"),
        "tones": DatasetSource(generated_data.tones, "sequence", "classification"),
        "gestures": DatasetSource(
            generated_data.gestures, "sequence", "classification", per_feature=True
        ),
        "tokens": DatasetSource(generated_data.tokens, "tokens", "classification"),
        "spirals": DatasetSource(
            generated_data.spirals, "vector", "classification", per_feature=True
        ),
        "surface": DatasetSource(generated_data.surface, "vector", "regression", per_feature=True),
    }
)
"""All data sets by name; :func:`load_dataset` makes one."""


def input_kind(name: str) -> InputKind:
    """The kind of sample a data set holds, without making it.

    Example:
        >>> input_kind("tokens")
        'tokens'
    """
    return _find_source(name).kind


def load_dataset(name: str, seed: int = 0) -> Dataset:
    """Make a data set.

    Args:
        name: a key of ``DATASETS``.
        seed: fixes the samples of generated data; measured data are always the same.

    Raises:
        ValueError: there is no such data set; the message lists those that exist.

    Example:
        >>> digits = load_dataset("digits")
        >>> digits.task, digits.outputs, digits.shape
        ('classification', 10, DataShape(kind='vector', size=(64,)))
        >>> load_dataset("mnist")
        Traceback (most recent call last):
        ...
        ValueError: no data set 'mnist'; choose from digits, digits_images, digits_rows, \
breast_cancer, wine, diabetes, textures, tones, gestures, tokens, spirals, surface
    """
    source = _find_source(name)
    raw_inputs, targets = source.make(seed)
    if source.kind == "tokens":
        shape = DataShape("tokens", (raw_inputs.shape[1], generated_data.VOCABULARY))
        inputs = raw_inputs
    else:
        shape = DataShape(source.kind, tuple(raw_inputs.shape[1:]))
        inputs = _standardise(raw_inputs, source.per_feature)
    if source.task == "classification":
        outputs = int(targets.max()) + 1
    else:
        targets = _standardise(targets, per_feature=True)
        outputs = targets.shape[1]
    return Dataset(name, source.task, outputs, shape, inputs, raw_inputs, targets)


def _find_source(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise ValueError(f"no data set {name!r}; choose from {', '.join(DATASETS)}")
    return DATASETS[name]


def _standardise(values: Tensor, per_feature: bool) -> Tensor:
    """Mean 0 and standard deviation 1, per last-axis feature or over everything."""
    axes = tuple(range(values.dim() - 1)) if per_feature else tuple(range(values.dim()))
    deviation = values.std(dim=axes, keepdim=True)
    return (values - values.mean(dim=axes, keepdim=True)) / deviation.clamp_min(1e-6)
