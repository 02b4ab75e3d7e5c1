"""Forward hooks that copy a bounded sample of each layer's output into one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.compiled_regions import CompiledRegions
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.forward_rows import ForwardRows
from neuraldbg.capture.functional_activations import FunctionalActivation
from neuraldbg.capture.graph_walk import Node
from neuraldbg.capture.guard import Guard
from neuraldbg.capture.layer_hook import LayerHook
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.probe import Deferred, Probes
from neuraldbg.capture.sampling import SampleBuffer, Snapshot
from neuraldbg.series import Kind

_MOST_PASSES = 8
"""Passes of one step (micro-batches) whose samples are set aside; later ones are not sampled."""


@dataclass(slots=True, eq=False, repr=False)
class ForwardSampler:
    """Samples the outputs of the watched layers in the steps for which it is armed.

    Attributes:
        guard: Wraps every callback.
        dead_samples: See `Thresholds.dead_samples`.
        armed: Whether outputs are sampled now.
        producers: The `grad_fn` of each sampled output, for the walk of the loss's graph.
        batch: The raw tensors that entered the model in the pass now running, by layer.
        sentinels: Layers that open a pass or read the batch itself: they stay hooked when the
            others are not.
        evaluated: Layers called without gradients or in eval mode since the last training pass.
        uses_saved_tensor_hooks: Whether saved values are packed (checkpointing, offloading), so
            that reading them would run code of the model's.
        began: Whether a training pass has begun since the last backward pass.
    """

    guard: Guard
    dead_samples: int
    armed: bool = False
    producers: dict[Node, Layer] = field(default_factory=dict)
    batch: dict[Layer, Tensor] = field(default_factory=dict)
    sentinels: set[Layer] = field(default_factory=set)
    evaluated: set[Layer] = field(default_factory=set)
    uses_saved_tensor_hooks: bool = False
    began: bool = False
    _order: list[Layer] = field(default_factory=list)
    _numbered: int = 0
    _sampled: set[Layer] = field(default_factory=set)
    _previous: Layer | None = None
    _cut: bool = False
    _thorough: bool = True
    _unseen: set[Layer] = field(default_factory=set)
    _all_hooked: bool = False
    _sampled_evaluation: bool = False
    _buffer: SampleBuffer = field(default_factory=SampleBuffer)
    _bounds: dict[Layer, tuple[float, float] | None] = field(default_factory=dict)
    _rows: ForwardRows = field(init=False)
    _passes: list[Snapshot] = field(default_factory=list)
    _ended: bool = False
    _handles: dict[Layer, RemovableHandle] = field(default_factory=dict)
    _layers: list[Layer] = field(default_factory=list)
    _probes: Probes | None = None
    _hidden: bool = False
    _unhooked: set[Layer] = field(default_factory=set)
    _regions: CompiledRegions = field(init=False)
    _evaluated_compiled: set[Layer] = field(default_factory=set)
    _callback: Callable[[Layer, Any, Any], None] = field(init=False)

    def __post_init__(self) -> None:
        self._callback = self.guard.wrap(self._on_forward)
        self._rows = ForwardRows(self.dead_samples)
        self._regions = CompiledRegions(self.guard, self)

    def attach(self, models: Sequence[nn.Module], layers: Iterable[Layer], probes: Probes) -> None:
        """Watch these models' layers, armed, and tell the probes of their calls."""
        self._probes = probes
        self._layers = list(layers)
        self._regions.attach(models, self._layers)
        self.armed = False
        self.arm(True)

    def watch(self, layers: Iterable[Layer]) -> None:
        """Watch these layers from now on instead of those before, armed or not as it was."""
        self._layers = list(layers)
        for layer in set(self._handles).difference(self._layers):
            self._handles.pop(layer).remove()
        self._regions.watch(self._layers)
        self._numbered = -1
        self._hook()

    def arm(self, armed: bool, thorough: bool = True) -> None:
        """Sample the passes from now on, or let them be.

        With `thorough`, what a pass is made of is looked at too: which layers read the batch, what
        the graph consists of.

        A module with a hook is called more slowly, so while nothing is sampled only the sentinels
        keep theirs.
        """
        self._thorough = thorough
        self._regions.ensure()
        if armed == self.armed:
            return
        self.armed = armed
        self._hook()

    def hook_all(self, wanted: bool) -> None:
        """Keep all layers hooked though no step is sampled, while an evaluation is looked at."""
        if wanted != self._all_hooked:
            self._all_hooked = wanted
            self._hook()

    def _hook(self) -> None:
        if self._hidden:
            return
        for layer in self._layers:
            wanted = self.armed or self._all_hooked or layer in self.sentinels or not self.sentinels
            wanted = wanted and layer not in self._unhooked
            if wanted and layer not in self._handles and layer.module is not None:
                hook = LayerHook(layer, self._callback)
                self._handles[layer] = layer.module.register_forward_hook(hook)
            elif not wanted and layer in self._handles:
                self._handles.pop(layer).remove()

    def hide_hooks(self) -> None:
        """Remove the hooks while something is compiled: they would be compiled too."""
        self._hidden = True
        self._unhook()

    def show_hooks(self) -> None:
        """Put them back; compiled code does not call them."""
        self._hidden = False
        self._hook()

    def leave_unhooked(self, layers: Iterable[Layer]) -> None:
        """Hook these layers no more: compiled code would not be used while they have hooks."""
        if not self._unhooked.issuperset(found := set(layers)):
            self._unhooked |= found
            self._hook()

    def _unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Remove all hooks and let go of the model's tensors."""
        self._unhook()
        self._regions.detach()
        self._hidden = False
        if self.evaluated:
            self._end_evaluation(was_one=True)
        self.armed = self._all_hooked = False
        self.release()

    def release(self) -> None:
        """Let go of the graph and the batch of the pass that ended."""
        self.producers.clear()
        self.batch.clear()
        if self.evaluated:
            self._end_evaluation(was_one=False)
        self._sampled_evaluation = False
        self._evaluated_compiled.clear()
        self.began = False
        self._previous = None
        self._cut = False
        self._ended = True

    def _on_forward(self, layer: Layer, args: Any, output: Any) -> None:
        assert self._probes is not None
        if self._is_evaluation(layer, args, output):
            return
        if not self.armed:
            self._note_batch(layer, args)
            return
        # A recompute of activation checkpointing runs inside a backward pass.
        if torch._C._current_graph_task_id() != -1:
            return
        if self._ended:
            self._begin_pass()
        tensor = first_tensor(output)
        if tensor is None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self._unseen.add(layer)
            return
        if self._thorough or not layer.called:
            self._note_flow(layer, args, tensor)
        elif layer in self.sentinels:
            self._note_entry(layer, args)
        self._sample(layer, tensor.detach())
        self._previous = layer
        self._probes.call("on_forward", layer, args, output)

    def _note_flow(self, layer: Layer, args: Any, tensor: Tensor) -> None:
        """Note where a layer stands in the flow of data and what its output came from."""
        if not layer.called:
            layer.called = True
            self._order.append(layer)
        self._note_entry(layer, args)
        if tensor.grad_fn is None:
            self._cut = True
        else:
            self.producers[tensor.grad_fn] = layer
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self.uses_saved_tensor_hooks = True

    def enter_compiled(self, entries: Sequence[tuple[Layer, Tensor]]) -> None:
        """Compiled code of the models begins a training pass; see `compiled_regions.Sampler`."""
        self.began = True
        self.batch.update(entries)

    def sample_compiled(self, layer: Layer, value: Tensor, entry: Tensor | None, cut: bool) -> None:
        """Take the output of a layer inside compiled code; see `compiled_regions.Sampler`."""
        self._tell_evaluation_apart(layer)
        if self._ended:
            self._begin_pass()
        if not layer.called:
            layer.called = True
            self._order.append(layer)
        if entry is not None and not self._cut and layer not in self._sampled:
            self._copy_input(layer, entry)
        self._cut |= cut
        self._sample(layer, value)
        self._previous = layer

    def sample_function(
        self, layer: Layer, value: Tensor, bounds: tuple[float, float] | None
    ) -> None:
        """Take what a function made of a layer's output inside compiled code."""
        if self._thorough:
            self.sample_activations([FunctionalActivation(layer, value, bounds)])

    def _tell_evaluation_apart(self, layer: Layer) -> None:
        """Drop what was sampled of an evaluation that ran with gradients before this call."""
        if layer.module is not None and not layer.module.training:
            self._evaluated_compiled.add(layer)
        elif layer in self._evaluated_compiled:
            self._drop_samples()

    def _drop_samples(self) -> None:
        self._buffer.drain()
        self._sampled.clear()
        self.release()

    def _sample(self, layer: Layer, tensor: Tensor) -> None:
        """Copy a sample of a layer's output, of the first call in a pass."""
        if layer not in self._sampled and tensor.dim() and tensor.numel():
            self._sampled.add(layer)
            axis = layer.unit_axis(tensor.dim(), self._previous)
            self._buffer.copy((layer, "output"), tensor, axis)

    def _is_evaluation(self, layer: Layer, args: Any, output: Any) -> bool:
        """Whether a call is surely not of training; calls of evaluations are passed on."""
        assert self._probes is not None
        with_gradient = torch.is_grad_enabled()
        trains = layer.module is None or layer.module.training
        if with_gradient and trains and not self.evaluated:
            return False  # the usual case, at once
        if with_gradient and torch._C._current_graph_task_id() != -1:
            return False  # a recompute of activation checkpointing
        if not with_gradient or not trains:
            self.evaluated.add(layer)
            self._probes.call_on_evaluation("on_evaluation", layer, args, output)
            # With gradients it shows later what it was: when no backward pass follows.
            self._sampled_evaluation |= self.armed and with_gradient
            return not with_gradient
        if layer in self.evaluated:
            self._end_evaluation(was_one=True)
            if self._sampled_evaluation:  # it would pass for a sample of the step
                self._drop_samples()
        return False

    def _end_evaluation(self, was_one: bool) -> None:
        assert self._probes is not None
        self.evaluated.clear()
        self._probes.call_on_evaluation("after_evaluation", was_one)

    def _renumber(self) -> None:
        """Number the layers in the order in which data flows.

        That is the order of their calls; a layer that is never called itself (attention applies
        the weights of its output projection without calling it) follows the one registered
        before it.
        """
        followers: dict[Layer | None, list[Layer]] = {}
        last_called: Layer | None = None
        for layer in self._layers:
            if layer.called:
                last_called = layer
            else:
                followers.setdefault(last_called, []).append(layer)
        ordered = [*followers.get(None, ())]
        for layer in self._order:
            ordered += [layer, *followers.get(layer, ())]
        for index, layer in enumerate(ordered):
            layer.index = index
        self._numbered = len(self._order)

    def _note_entry(self, layer: Layer, args: Any) -> None:
        """Remember a layer that reads the batch itself and not another layer's output."""
        value = first_tensor(args)
        if self._previous is None:
            self.sentinels.add(layer)
        if value is None or value.requires_grad or self._cut or layer in self._sampled:
            return
        self.sentinels.add(layer)
        self.batch[layer] = value
        self._copy_input(layer, value)

    def _copy_input(self, layer: Layer, value: Tensor) -> None:
        if value.dim() and value.numel():
            axis = layer.unit_axis(value.dim(), None)
            self._buffer.copy((layer, "input"), value, axis)

    def _note_batch(self, layer: Layer, args: Any) -> None:
        self.began = True
        value = first_tensor(args)
        if value is not None and not value.requires_grad:
            self.batch[layer] = value

    def sample_activations(self, activations: Sequence[FunctionalActivation]) -> None:
        """Sample functional activations; they count as part of the layer that they follow."""
        for activation in activations:
            layer = activation.owner
            assert isinstance(layer, Layer)
            if not activation.result.numel():
                continue
            axis = layer.unit_axis(activation.result.dim())
            self._buffer.copy((layer, "activation"), activation.result, axis)
            self._bounds[layer] = activation.bounds

    def coverage(self) -> dict[tuple[str, str | None], str]:
        """What could not be observed in forward passes, and why."""
        found: dict[tuple[str, str | None], str] = {}
        if self.uses_saved_tensor_hooks:
            found["functional activations", None] = "saved tensors are packed (checkpointing)"
        for layer in self._unseen:
            found[Kind.OUTPUT, layer.name] = "its output holds no tensor, or torch.func was at work"
        return found | self._regions.coverage()

    def collect(self, step: int) -> Deferred:
        """Rows about what was sampled since the last call: outputs and inputs of all passes."""
        passes = [*self._passes, self._buffer.drain()]
        self._passes.clear()
        self._sampled.clear()
        if self._numbered < len(self._order):
            self._renumber()
        bounds, thorough = dict(self._bounds), self._thorough

        def make(arrays: list[np.ndarray]) -> list[Block]:
            samples = [p.samples(values) for p, values in zip(passes, arrays, strict=True)]
            return self._rows.blocks(step, samples, bounds, thorough)

        return Deferred(make, [snapshot.values for snapshot in passes])

    def _begin_pass(self) -> None:
        """Set the samples of the pass that ended aside: another one of the same step begins."""
        self._ended = False
        if self._sampled and len(self._passes) < _MOST_PASSES:
            self._passes.append(self._buffer.drain().kept())
            self._sampled.clear()
