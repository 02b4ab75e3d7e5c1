"""A number that may still lie on an accelerator, fetched when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from neuraldbg.capture.local_shards import is_whole, local_shard


class LateNumber:
    """Stands for a float that is worked out once, when `float()` asks for it.

    Example:
        >>> number = LateNumber(lambda: 2.5)
        >>> float(number)
        2.5
    """

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], float]) -> None:
        self._make: Callable[[], float] | None = make
        self._value = float("nan")

    def __float__(self) -> float:
        if self._make is not None:
            self._value, self._make = float(self._make()), None  # lets go of the tensors
        return self._value

    def __repr__(self) -> str:
        return "LateNumber()" if self._make is not None else f"LateNumber({self._value})"


def late(make: Callable[[], float]) -> float:
    """A number that is worked out when the series is made; it passes for a float there."""
    return cast("float", LateNumber(make))


def is_late(number: object) -> bool:
    """Whether a number is still to be fetched.

    >>> is_late(2.0), is_late(late(lambda: 2.0))
    (False, True)
    """
    return isinstance(number, LateNumber)


def number_of(tensor: Tensor) -> float:
    """The value of a tensor of one value, at once where it lies on the host, else late.

    Tensors that are split over ranks are not read, since that starts a collective, unless every
    rank has the whole of them.

    Args:
        tensor: Of one value; it may be written to later.

    Returns:
        A float, or a `LateNumber` that passes for one in the columns of the series.

    Example:
        >>> import torch
        >>> number_of(torch.tensor(3.0))
        3.0
    """
    if not is_whole(tensor):
        return float("nan")
    tensor = local_shard(tensor)
    if tensor.is_cpu:
        return float(tensor.detach().item())
    copy = tensor.detach().clone()
    return late(lambda: float(copy))
