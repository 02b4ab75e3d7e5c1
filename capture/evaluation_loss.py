"""The loss of an evaluation, from the calls of loss functions in it and the model's own output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

OWN_LOSS = "the model's own"
"""Stands for the function's name where a model returns its loss itself."""

_OF_NODE = {
    "NllLossBackward0": ("cross_entropy", "nll_loss"),
    "NllLoss2DBackward0": ("cross_entropy", "nll_loss"),
    "NllLossNdBackward0": ("cross_entropy", "nll_loss"),
    "MseLossBackward0": ("mse_loss",),
    "SmoothL1LossBackward0": ("smooth_l1_loss",),
    "HuberLossBackward0": ("huber_loss",),
    "BinaryCrossEntropyBackward0": ("binary_cross_entropy",),
    "BinaryCrossEntropyWithLogitsBackward0": ("binary_cross_entropy_with_logits",),
}
"""The functions that end in a node of the autograd graph: such a root is that loss and no more."""
_MEAN = 1
"""`Reduction` of a mean as torch numbers them."""
_OVER_CLASSES = ("cross_entropy", "nll_loss")
_CHANGES_THE_SCALE = ("weight", "pos_weight")


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """What a training loss is, as its graph tells.

    Attributes:
        functions: Loss functions that it may have been made by.
        is_mean: Whether it is the mean over the batch.
        weighted: Whether classes or elements had weights.
    """

    functions: tuple[str, ...] = ()
    is_mean: bool = False
    weighted: bool = False


def training_loss(root: Tensor) -> TrainingLoss:
    """What the loss that a backward pass begins with is.

    Example:
        >>> training_loss(torch.nn.MSELoss()(torch.ones(2, requires_grad=True), torch.zeros(2)))
        TrainingLoss(functions=('mse_loss',), is_mean=True, weighted=False)
        >>> training_loss(torch.ones(2, requires_grad=True).sum()).functions
        ()
    """
    node = root.grad_fn
    functions = _OF_NODE.get(node.name(), ()) if node is not None else ()
    if not functions:
        return TrainingLoss()
    weighted = any(getattr(node, f"_saved_{name}", None) is not None for name in _CHANGES_THE_SCALE)
    return TrainingLoss(functions, getattr(node, "_saved_reduction", None) == _MEAN, weighted)


@dataclass(slots=True)
class _Sum:
    """Losses of one function over the batches of an evaluation."""

    total: float | Tensor = 0.0
    count: float = 0.0
    weighted: bool = False
    exact: bool = True
    last_pass: int = -1


@dataclass(slots=True)
class LossTally:
    """Gathers the losses of one evaluation: the mean over its samples, function by function.

    Example:
        >>> tally = LossTally()
        >>> for number, value in enumerate((1.0, 3.0)):
        ...     pair = (torch.tensor([value]), torch.zeros(1))
        ...     tally.note("mse_loss", pair, {}, functional.mse_loss(*pair), number)
        >>> tally.result(TrainingLoss(("mse_loss",), True, False))
        ('mse_loss', 5.0, True)
    """

    _sums: dict[str, _Sum] = field(default_factory=dict)

    def note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, number: int
    ) -> None:
        """Add the result of one call; of several calls in one pass the first counts.

        Args:
            name: Of the loss function.
            args: Of the call.
            kwargs: Of the call.
            result: What it returned.
            number: Of the pass through the model.
        """
        sums = self._sums.setdefault(name, _Sum())
        if sums.last_pass == number or not isinstance(result, Tensor) or not result.numel():
            return
        call = _bound(name, args, kwargs)
        terms = _terms(name, call)
        if call.get("reduction", "mean") == "sum":
            sums.exact &= call.get("ignore_index", -100) == -100
            value = result / max(terms, 1)
        else:
            sums.exact &= result.dim() == 0
            value = result.mean()
        sums.exact &= not call.get("label_smoothing")
        sums.weighted |= any(call.get(key) is not None for key in _CHANGES_THE_SCALE)
        sums.last_pass = number
        self.add(name, value, terms)

    def add(self, name: str, value: Tensor, terms: int = 1) -> None:
        """Add the loss of a batch, a mean over some terms, without making a device wait."""
        sums = self._sums.setdefault(name, _Sum())
        known = float(value) if value.device.type == "cpu" else value.to(torch.float32, copy=True)
        sums.total = sums.total + known * terms
        sums.count += terms

    def result(self, training: TrainingLoss) -> tuple[str, float | Tensor, bool] | None:
        """The loss of the evaluation; None where none was seen.

        Where several functions were called, the one that training minimises is the loss (others
        are metrics), else what the model returned, else what was called first.

        Returns:
            The function's name, the mean, and whether it is the very same quantity as the
            training loss.
        """
        seen = [name for name, sums in self._sums.items() if sums.count]
        if not seen:
            return None
        same = [name for name in seen if name in training.functions]
        own = [name for name in seen if name == OWN_LOSS]
        name = (same or own or seen)[0]
        sums = self._sums[name]
        comparable = bool(
            same and training.is_mean and sums.exact and sums.weighted == training.weighted
        )
        return name, sums.total / sums.count, comparable


def own_loss(output: Any) -> Tensor | None:
    """The loss in what a model returned: an attribute or entry of that name, or a single number.

    >>> own_loss({"loss": torch.tensor(2.0), "logits": torch.zeros(3)})
    tensor(2.)
    >>> own_loss(torch.zeros(3)) is None
    True
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    is_number = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
    return loss if is_number else None


def _bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip(_parameters(name), args, strict=False)), **kwargs}


_NAMES: dict[str, tuple[str, ...]] = {}


def _parameters(name: str) -> tuple[str, ...]:
    known = _NAMES.get(name)
    if known is None:
        function: Callable[..., Any] = inspect.unwrap(getattr(functional, name))
        try:
            known = tuple(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            known = ("input", "target")
        _NAMES[name] = known
    return known


def _terms(name: str, call: dict[str, Any]) -> int:
    """Over how many terms the mean of a call runs, class weights and padding aside."""
    given, target = call.get("input"), call.get("target")
    if not isinstance(given, Tensor):
        return 1
    if name in _OVER_CLASSES:
        if isinstance(target, Tensor) and not target.is_floating_point():
            return target.numel()
        return given.numel() // max(given.shape[1 if given.dim() > 1 else 0], 1)
    if name == "kl_div" and call.get("reduction") == "batchmean":
        return len(given)
    return given.numel()
