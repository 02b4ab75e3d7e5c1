"""How statistics leave an accelerator: one asynchronous copy for each captured step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.probe import Deferred


@dataclass(slots=True)
class _Journey:
    """One step's tensors on their way to the host."""

    step: int
    rows: Sequence[Deferred]
    host: Tensor
    event: Any = None

    @property
    def has_arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def blocks(self) -> list[Block]:
        values = self.host.numpy()
        made: list[Block] = []
        position = 0
        for deferred in self.rows:
            arrays = []
            for tensor in deferred.tensors:
                size = tensor.numel()
                arrays.append(values[position : position + size].reshape(tensor.shape))
                position += size
            made += deferred.make(arrays)
        return made


@dataclass(slots=True)
class Transfers:
    """Takes the rows of captured steps and delivers their blocks once they are on the host.

    Rows whose tensors lie on the CPU are delivered at once. Those of an accelerator are joined
    into one vector there, copied to pinned memory without waiting, and delivered at a later call,
    in the order of their steps.

    Attributes:
        deliver: Called with the blocks of a step and the step.
        always_defer: Treat the CPU as an accelerator, so that tests see the same way taken.
    """

    deliver: Callable[[list[Block], int], None]
    always_defer: bool = False
    _under_way: deque[_Journey] = field(default_factory=deque)

    def send(self, step: int, rows: Sequence[Deferred]) -> None:
        """Take the rows of one captured step."""
        tensors = [tensor for deferred in rows for tensor in deferred.tensors]
        devices = {tensor.device.type for tensor in tensors}
        if devices <= {"cpu"} and not self.always_defer:
            self.settle()
            self.deliver([block for deferred in rows for block in deferred.now()], step)
            return
        self.settle(wait=False)
        self._under_way.append(_depart(step, rows, tensors))

    def settle(self, wait: bool = True) -> None:
        """Deliver what has arrived; with `wait`, all there is."""
        while self._under_way and (wait or self._under_way[0].has_arrived):
            journey = self._under_way.popleft()
            journey.wait()
            self.deliver(journey.blocks(), journey.step)


def _depart(step: int, rows: Sequence[Deferred], tensors: Sequence[Tensor]) -> _Journey:
    device = max((t.device for t in tensors), key=lambda d: d.type != "cpu")
    parts = [t.detach().reshape(-1).to(device, torch.float32, non_blocking=True) for t in tensors]
    joined = torch.cat(parts) if parts else torch.zeros(0)
    if device.type == "cpu":
        return _Journey(step, rows, joined)
    host = torch.empty(joined.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.Event(device)
    event.record()
    return _Journey(step, rows, host, event)
