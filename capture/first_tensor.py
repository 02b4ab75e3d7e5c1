"""Finding the tensor in whatever a module took or returned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def first_tensor(value: Any) -> Tensor | None:
    """The first floating tensor in whatever a module took or returned.

    Looks into tuples, lists, mappings and objects with attributes (as the output classes of model
    libraries are), to a depth of three.

    Example:
        >>> first_tensor({"mask": None, "hidden": (torch.zeros(2), 3)}).shape
        torch.Size([2])
        >>> first_tensor(torch.tensor([1, 2])) is None
        True
    """
    if type(value) is Tensor and value.is_floating_point():
        return value  # the usual case, at once
    return _first_tensor(value, 3)


def _first_tensor(value: Any, depth: int) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.layout is torch.strided else None
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value.data
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return None
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    else:
        return None
    for part in parts:
        found = _first_tensor(part, depth - 1)
        if found is not None:
            return found
    return None
