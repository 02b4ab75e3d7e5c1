"""Ways of watching a training loop whose costs are compared: this project's and plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
from neuraldbg.capture.budget import START_STEPS

_DENSE = 1_000_000


@dataclass(frozen=True, slots=True)
class Observer:
    """A way of watching a model.

    Attributes:
        watch: Gives the context manager that watches a model.
        warm_up: Steps before its cost is what it will be in the long run.
        compiled: Whether the model, watched and bare, is compiled.
    """

    watch: Callable[[nn.Module], AbstractContextManager[Any]]
    warm_up: int = 32
    compiled: bool = False


@contextlib.contextmanager
def five_reductions(model: nn.Module) -> Iterator[None]:
    """The usual hand-made watch: five statistics of every output, each fetched at once."""
    kept: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def read(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                values = output.detach()
                kept[name] = [
                    values.mean().item(), values.std().item(), values.norm().item(),
                    values.abs().max().item(), (values == 0).float().mean().item(),
                ]  # fmt: skip

        return read

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def anomaly_detection(model: nn.Module) -> Iterator[None]:
    """PyTorch's own `torch.autograd.detect_anomaly`."""
    torch.autograd.set_detect_anomaly(True)  # the context manager warns, this does not
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(False)


OBSERVERS: Mapping[str, Observer] = {
    "defaults": Observer(NeuralDbg, START_STEPS + 64),
    "defaults, compiled": Observer(NeuralDbg, START_STEPS + 64, compiled=True),
    "every step": Observer(
        lambda model: NeuralDbg(model, schedule=Schedule(dense_steps=_DENSE)), warm_up=32
    ),
    "five `.item()` a hook": Observer(five_reductions),
    "`detect_anomaly`": Observer(anomaly_detection),
}
