"""Gradients of the layers' outputs, sampled where the backward pass leaves them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.local_shards import local_shard
from neuraldbg.capture.moments import Moments
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.sampling import SampleBuffer, Samples
from neuraldbg.series import Kind

_MOST_CALLS = 8
"""Calls of a layer in a step (shared layers, micro-batches) whose gradients are looked at."""


class OutputGradient(Probe):
    """Leaves rows of kind output_gradient, with the statistics of a sample.

    A hook on the output tensor itself sees the gradient also where the next module writes to that
    tensor (in-place ReLU), where hooks on modules fail. The gradient is with respect to the output
    as the layer returned it. All calls of a layer in a step become one row.

    Gradients that no backward pass of the loss brings (`torch.autograd.grad`, as for a penalty on
    gradients) are not looked at. Hooks hold nothing of the graph, and are removed when the step
    ends, so that a graph that outlives it is left without them.
    """

    rarely: ClassVar[bool] = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._buffer = SampleBuffer()
        self._hooked: dict[Layer, int] = {}  # calls in this step
        self._arrived: dict[Layer, int] = {}  # gradients of them
        self._handles: list[RemovableHandle] = []
        self._passed = 0  # hooks made before the last backward pass ended
        self._running = False  # whether a backward pass of the watched models is under way
        self._receive = run.guard.wrap(self._on_gradient, "OutputGradient.on_gradient")

    def detach(self) -> None:  # noqa: D102
        self._passed = len(self._handles)
        self._end_step()
        self._running = False
        self._buffer = SampleBuffer()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: ARG002, D102
        tensor = first_tensor(output)
        # A leaf is a parameter or the batch: a hook there would outlive the graph.
        if tensor is None or tensor.grad_fn is None:
            return
        calls = self._hooked.get(layer, 0)
        if calls < _MOST_CALLS:
            self._hooked[layer] = calls + 1
            # Returns None: the gradient stays as it is.
            hook = functools.partial(self._receive, layer)
            self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def _on_gradient(self, layer: Layer, gradient: Any) -> None:
        number = self._arrived.get(layer, 0)
        if not self._running or number >= _MOST_CALLS or not isinstance(gradient, Tensor):
            return
        values = local_shard(gradient).detach()
        if _can_be_sampled(values):
            self._arrived[layer] = number + 1
            axis = layer.unit_axis(values.dim())
            self._buffer.copy((layer, f"output_gradient {number}"), values, axis)

    def before_backward(self, roots: Sequence[Tensor]) -> None:  # noqa: ARG002, D102
        self._running = True

    def after_backward(self) -> None:  # noqa: D102
        self._running = False
        self._passed = len(self._handles)

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        self._end_step()
        snapshot = self._buffer.drain()
        if not snapshot.keys:
            return ()
        step = self.run.current_step()
        return [
            Deferred(
                lambda arrays: [_row_each(step, snapshot.samples(arrays[0]))], (snapshot.values,)
            )
        ]

    def _end_step(self) -> None:
        """Remove the hooks of the step's passes.

        Without an optimizer a step ends when the next one's backward pass begins: the hooks of
        that pass have been made already, and stay.
        """
        self._hooked.clear()
        self._arrived.clear()
        ended, self._handles = self._handles[: self._passed], self._handles[self._passed :]
        self._passed = 0
        for handle in ended:
            handle.remove()


def _can_be_sampled(gradient: Tensor) -> bool:
    return bool(
        gradient.layout is torch.strided
        and gradient.is_floating_point()
        and gradient.dim()
        and gradient.numel()
        and not torch._C._functorch.is_functorch_wrapped_tensor(gradient)
    )


def _row_each(step: int, samples: Samples) -> Block:
    """One row for each layer, of all its calls."""
    moments = Moments.of(samples).under([(layer, "") for layer, _ in samples.keys])
    layers = [layer for layer, _ in moments.keys]
    return Block(step, Kind.OUTPUT_GRADIENT, layers, dict(moments.columns()))
