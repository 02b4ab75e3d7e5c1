"""Real data that ship with scikit-learn, in the units they were measured or stored in."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


def digits(seed: int = 0) -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits as 64 pixel values of 0 to 255, as image files store them."""
    return _digits()


def digits_images(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The digits as images of one channel."""
    pixels, labels = _digits()
    return pixels.reshape(-1, 1, 8, 8), labels


def digits_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The digits read row by row: sequences of eight steps.

    Example:
        >>> tuple(digits_rows()[0].shape)
        (1797, 8, 8)
    """
    pixels, labels = _digits()
    return pixels.reshape(-1, 8, 8), labels


def breast_cancer(seed: int = 0) -> tuple[Tensor, Tensor]:
    """569 tumours, 30 features from thousandths to thousands, benign or malignant."""
    return _tabular("breast_cancer")


def wine(seed: int = 0) -> tuple[Tensor, Tensor]:
    """178 wines, 13 features from tenths to thousands, three growers."""
    return _tabular("wine")


def diabetes(seed: int = 0) -> tuple[Tensor, Tensor]:
    """442 patients, ten features in clinical units, progression after one year."""
    return _tabular("diabetes")


@cache
def _digits() -> tuple[Tensor, Tensor]:
    pixels, labels = _sklearn_datasets().load_digits(return_X_y=True)
    return _tensor(pixels * (255 / 16)), torch.as_tensor(labels, dtype=torch.long)


@cache
def _tabular(name: str) -> tuple[Tensor, Tensor]:
    if name == "diabetes":
        features, progression = _sklearn_datasets().load_diabetes(return_X_y=True, scaled=False)
        return _tensor(features), _tensor(progression).reshape(-1, 1)
    features, labels = getattr(_sklearn_datasets(), f"load_{name}")(return_X_y=True)
    return _tensor(features), torch.as_tensor(labels, dtype=torch.long)


def _sklearn_datasets() -> ModuleType:
    # Imported on first use: it takes a second, and is an optional dependency.
    try:
        return import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the measured data sets ship with scikit-learn: pip install 'neuraldbg[evaluation]'"
        ) from error


def _tensor(values: np.ndarray) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)
