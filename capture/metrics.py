"""What the user knows and the hooks cannot see: numbers handed over by `NeuralDbg.record`."""

from __future__ import annotations

import contextlib
import re
import warnings
from numbers import Real

import numpy as np
from torch import Tensor

_OF_VALIDATION = ("val", "valid", "validation", "test", "dev", "eval", "heldout", "holdout")
_TO_MINIMISE = (
    "loss", "nll", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "bce", "xent",
    "crossentropy", "entropy", "wer", "cer",
)  # fmt: skip


class MetricWarning(UserWarning):
    """Something recorded was no number and was left out."""


def is_validation_loss(name: str) -> bool:
    """Whether a metric's name says that it is a loss, to be minimised, on validation data.

    Example:
        >>> [is_validation_loss(name) for name in ("val_loss", "valLoss", "test/perplexity")]
        [True, True, True]
        >>> [is_validation_loss(name) for name in ("val_accuracy", "train_loss", "interval_loss")]
        [False, False, False]
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = re.split(r"[^a-z]+", spaced.lower())
    return any(word in _OF_VALIDATION for word in words) and any(
        word in _TO_MINIMISE for word in words
    )


def read_metric(name: str, value: object) -> float | Tensor | None:
    """A metric's value as a number, or as a tensor of its own where it lies on an accelerator.

    Args:
        name: Of the metric.
        value: A number, a NumPy scalar, or an array or tensor of one element.

    Returns:
        None for anything else, with a `MetricWarning` that says what is accepted.

    Example:
        >>> read_metric("accuracy", np.float32(0.5)), read_metric("correct", 3)
        (0.5, 3.0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     read_metric("accuracy", "high")
        >>> print(caught[0].message)
        record(accuracy=...): 'high' is no number and was left out; accepted are int, float, NumPy \
scalars, and tensors or arrays of one element
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        number = value.detach().reshape(())
        return number.item() * 1.0 if number.device.type == "cpu" else number.float().clone()
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.reshape(()))
    if isinstance(value, (Real, np.bool_)):
        return float(value)
    _warn(name, value)
    return None


def _warn(name: str, value: object) -> None:
    shown = repr(value) if isinstance(value, (str, int)) else type(value).__name__
    if isinstance(value, Tensor | np.ndarray):
        shown = f"{type(value).__name__} of shape {tuple(value.shape)}"
    # Warnings turned into errors must not reach the training loop.
    with contextlib.suppress(MetricWarning):
        warnings.warn(
            f"record({name}=...): {shown} is no number and was left out; accepted are int, float, "
            "NumPy scalars, and tensors or arrays of one element",
            MetricWarning,
            stacklevel=7,  # the line that called `NeuralDbg.record`
        )
