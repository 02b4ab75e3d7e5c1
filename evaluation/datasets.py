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

Task = Literal["classification", "regression"]
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
    task: Task
    outputs: int
    shape: DataShape
    inputs: Tensor
    raw_inputs: Tensor
    targets: Tensor

    def batches(
        self, batch_size: int, steps: int, seed: int, standardised: bool = True
    ) -> list[Batch]:
        """Draw batches epoch by epoch, each epoch in a new order, short last batches dropped.

        Args:
            batch_size: samples of a batch, at most all.
            steps: batches to draw.
            seed: fixes the order.
            standardised: False gives the raw inputs.

        Example:
            >>> [tuple(x.shape) for x, _ in load_dataset("wine").batches(64, 3, seed=0)]
            [(64, 13), (64, 13), (64, 13)]
        """
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs if standardised else self.raw_inputs
        samples = len(inputs)
        size = min(batch_size, samples)
        batches: list[Batch] = []
        while len(batches) < steps:
            order = torch.randperm(samples, generator=generator)
            for start in range(0, samples - size + 1, size):
                chosen = order[start : start + size]
                batches.append((inputs[chosen], self.targets[chosen]))
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
    task: Task
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
