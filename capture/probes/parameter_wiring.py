"""How parameters hang together with the loss: reached or not, called or not, held by whom.

Looked at in the first captured steps, then in every sixteenth, and whenever parameters come, go
or change whether they require a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.freshness import fans, is_norm, looks_fresh, norm_looks_fresh, sample_of
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.local_shards import stored_parameters
from neuraldbg.capture.optimizer_watch import parameters_of, watch_optimizers
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.reached_parameters import reached_leaves
from neuraldbg.capture.unregistered import Strangers
from neuraldbg.series import Kind

_FIRST_STEPS = 16
"""Captured steps that are all looked at."""
_PERIOD = 16


@dataclass(slots=True)
class _Pass:
    """The layers called since the last backward pass ended, and what they read and put out."""

    called: list[Layer] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    made: dict[tuple[int, ...], set[Layer]] = field(default_factory=dict)

    def clear(self) -> None:
        self.made.clear()
        self.called.clear()
        self.read.clear()


class ParameterWiring(Probe):
    """Leaves the flags of the rows of kind parameter: reached, called, consumed, fresh."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._stop: Callable[[], None] | None = None
        self._looks = 0
        self._step = -1
        self._due = False
        self._complete = True
        self._hidden = False  # whether the graph of any step was not seen in full
        self._signature: tuple[int, int] = (0, 0)
        self._reached: set[Tensor] = set()
        self._consumed: set[Layer] = set()
        self._fitting: set[Layer] = set()  # a later layer reads something of the same shape
        self._outside_grad: set[Layer] = set()
        self._fresh: dict[Layer, float] = {}
        self._flags: tuple[list[Layer], dict[str, np.ndarray]] = ([], {})
        self._parts_of_called: set[nn.Module] = set()
        self._pass = _Pass()
        self._strangers = Strangers()

    def attach(self) -> None:  # noqa: D102
        self._stop = watch_optimizers(self._note_optimizer, _ignore)

    def detach(self) -> None:  # noqa: D102
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._optimizers = WeakSet()
        self._reached.clear()
        self._parts_of_called.clear()
        self._pass.clear()

    def _note_optimizer(self, optimizer: Optimizer, has_closure: bool) -> None:  # noqa: ARG002
        self._optimizers.add(optimizer)

    # Forward ------------------------------------------------------------------------------------

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: D102
        if self._is_due():
            self._note_call(layer, args, output)

    def on_evaluation(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: D102
        if self._is_due() and layer.module is not None and layer.module.training:
            self._outside_grad.add(layer)
            self._note_call(layer, args, output)

    def _note_call(self, layer: Layer, args: Any, output: Any) -> None:
        """Follow what flows from layer to layer, and where it leaves the graph."""
        if not layer.parameters:
            return
        given, made = _argument(args), first_tensor(output)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters)
        if given is not None and not given.requires_grad:
            if trains and given.data_ptr() not in self._pass.read:
                self._consumed.update(self._pass.called)
            self._pass.read.add(given.data_ptr())
        if given is not None and given.dim() > 1:
            self._fitting |= self._pass.made.get(tuple(given.shape), set())
        if made is not None:
            self._pass.made.setdefault(tuple(made.shape), set()).add(layer)
            self._pass.read.discard(made.data_ptr())
            if made.requires_grad and not trains:
                self._consumed.add(layer)
        self._pass.called.append(layer)

    # Backward -----------------------------------------------------------------------------------

    def before_backward(self, roots: Sequence[Tensor]) -> None:  # noqa: D102
        self._pass.clear()
        if not self._is_due():
            return
        found = reached_leaves(roots)
        self._complete = self._complete and found.complete
        self._hidden = self._hidden or not found.complete
        stored = stored_parameters(self.run.models)
        leaves = [stored.get(leaf, leaf) for leaf in found.leaves]
        known = {p for model in self.run.models for p in model.parameters()}.union(stored.values())
        strangers = [leaf for leaf in leaves if leaf not in known]
        self._reached.update(leaf for leaf in leaves if leaf in known)
        if strangers:
            self._strangers.note(strangers, self._step, self.run.models)

    def _is_due(self) -> bool:
        """Whether the step that the pass now running belongs to is looked at."""
        step = self.run.current_step()
        if step != self._step:
            parameters = self.run.watched_parameters
            signature = (len(parameters), sum(p.requires_grad for p in parameters))
            changed = signature != self._signature
            self._due = self._looks < _FIRST_STEPS or self._looks % _PERIOD == 0 or changed
            self._step, self._signature = step, signature
            self._looks += 1
            self._complete = True
            self._reached.clear()
            self._pass.clear()
        return self._due

    # Rows ---------------------------------------------------------------------------------------

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        layers = list(self.run.layers_with_parameters)
        if not layers:
            return
        held = {p for optimizer in self._optimizers for p in parameters_of(optimizer)}
        if self._due:
            odd = [layer for layer in layers if self._is_odd(layer, held)]
            if odd:
                self._fresh.update(dict.fromkeys(odd, math.nan))
                yield _judge(odd, self._fresh)
            self._flags = layers, self._look(layers)
        if self._flags[0] == layers:
            yield Deferred(self._rows(self._step, *self._flags))
        if self._strangers:
            yield Deferred.of([self._strangers.rows(self._step, held)])

    def coverage(self) -> Mapping[tuple[str, str | None], str]:  # noqa: D102
        if self._hidden:
            return {("reached parameters", None): "the graph is too large or has custom functions"}
        return {}

    def _rows(
        self, step: int, layers: list[Layer], flags: dict[str, np.ndarray]
    ) -> Callable[[list[np.ndarray]], list[Block]]:
        """What makes the rows: whether weights look fresh is known by then.

        Each captured step has them, as last looked at, so that they outlast any thinning.
        """

        def make(_: list[np.ndarray]) -> list[Block]:
            fresh = np.array([self._fresh.get(layer, math.nan) for layer in layers])
            return [Block(step, Kind.PARAMETER, layers, {**flags, "fresh": fresh})]

        return make

    def _look(self, layers: list[Layer]) -> dict[str, np.ndarray]:
        self._parts_of_called = {
            part
            for layer in self.run.layers
            if layer.called and layer.module is not None and layer.parameters
            for part in layer.module.children()
        }
        optional = self._optional(layers)
        columns = {
            "reached": [self._is_reached(layer) for layer in layers],
            "called": [
                float(self._is_called(layer)) if layer not in optional else math.nan
                for layer in layers
            ],
            "consumed": [
                1.0 if layer in self._consumed else 0.5 if layer in self._fitting else 0.0
                for layer in layers
            ],
        }
        return {name: np.array(values) for name, values in columns.items()}

    def _is_reached(self, layer: Layer) -> float:
        trainable = [p for p in layer.parameters if p.requires_grad]
        if not trainable:
            return math.nan
        if any(p in self._reached for p in trainable):
            return 1.0
        return 0.0 if self._complete else math.nan

    def _is_called(self, layer: Layer) -> bool:
        """Whether a layer, or one that it is a part of (attention), has been called."""
        called = layer.called or layer in self._outside_grad
        return called or layer.module in self._parts_of_called

    def _is_odd(self, layer: Layer, held: set[Parameter]) -> bool:
        """Whether it matters if a layer's weights have been trained before: they are not now."""
        if layer in self._fresh:
            return False
        trainable = [p for p in layer.parameters if p.requires_grad]
        return not trainable or not any(p in self._reached and p in held for p in trainable)

    def _optional(self, layers: Sequence[Layer]) -> set[Layer]:
        """Uncalled members of containers that call others: experts, heads of other tasks."""
        idle = {layer.module: layer for layer in layers if not self._is_called(layer)}
        if not idle:
            return set()
        busy = {layer.module for layer in self.run.layers if self._is_called(layer)}
        found: set[Layer] = set()
        for model in self.run.models:
            for container in model.modules():
                if isinstance(container, (nn.ModuleList, nn.ModuleDict)):
                    members = [set(member.modules()) for member in container.children()]
                    if any(member & busy for member in members):
                        found |= {
                            idle[module]
                            for member in members
                            if not member & busy
                            for module in member & idle.keys()
                        }
        return found


def _argument(args: Any) -> Tensor | None:
    """What a layer reads: numbers, or the indices of an embedding."""
    first = args[0] if isinstance(args, tuple) and args else None
    if type(first) is Tensor and first.layout is torch.strided and not _is_wrapped(first):
        return first
    found = first_tensor(args)
    return None if found is None or _is_wrapped(found) else found


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others inside `torch.func` and has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _ignore(optimizer: Optimizer) -> None:
    """Nothing to do once an optimizer has stepped."""


def _judge(layers: list[Layer], fresh: dict[Layer, float]) -> Deferred:
    """Find out whether the weights of some layers look as initialised; makes no rows."""
    tensors, shapes = [], [fans(layer) for layer in layers]
    for layer in layers:
        weight = layer.sampled_weight
        tensors.append(sample_of([weight]))
        tensors.append(sample_of([p for p in layer.parameters if p.dim() < 2 and p is not weight]))

    def make(arrays: list[np.ndarray]) -> list[Block]:
        for layer, shape, weight, bias in zip(
            layers, shapes, arrays[::2], arrays[1::2], strict=True
        ):
            norm = is_norm(layer)
            fresh[layer] = (
                norm_looks_fresh(weight, bias) if norm else looks_fresh(weight, bias, *shape)
            )
        return []

    return Deferred(make, tensors)
