"""The recorder: follows a training loop through its hooks and keeps the run's series.

One step, as the hooks see it: forward (samples of outputs), backward (loss, its anatomy, whether
gradients were reset), the optimizer's step (gradients before it, weights on both sides), then the
statistics of all that at once. A loop without an optimizer is followed by its backward calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.parameter import UninitializedParameter as Uninitialized
from torch.optim import Optimizer

from neuraldbg.capture.backward_watch import BackwardWatcher, watch_backward
from neuraldbg.capture.forward_sampler import ForwardSampler
from neuraldbg.capture.guard import Guard
from neuraldbg.capture.layers import Layer, find_layers
from neuraldbg.capture.loss_anatomy import Node, reaches
from neuraldbg.capture.loss_reader import Loss, LossReader, mean_loss
from neuraldbg.capture.optimizer_watch import (
    OptimizerRecord,
    OptimizerRegistry,
    learning_rate,
    parameters_of,
    watch_optimizers,
)
from neuraldbg.capture.parameter_sampler import ParameterSampler
from neuraldbg.capture.probe import Probes
from neuraldbg.capture.probes import PROBES
from neuraldbg.capture.run_log import Block, Pulse, RunLog
from neuraldbg.capture.schedule import Schedule
from neuraldbg.capture.statistics import Columns
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_MOST_MICRO_BATCHES = 64
"""Backward calls that may come before the first optimizer step and still belong to it."""


@dataclass(slots=True)
class _Pending:
    """What backward passes have shown since the last optimizer step."""

    losses: list[Loss] = field(default_factory=list)
    expected: float = math.nan
    blocks: list[Block] = field(default_factory=list)


class Recorder:
    """Watches models through one run and answers with the series of their statistics.

    Args:
        models: The models whose layers are watched.
        thresholds: Limits; the recorder itself needs only `dead_samples`.
        schedule: Which steps are captured.

    Raises:
        TypeError: something given is not a module.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        thresholds: Thresholds | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.schedule = schedule or Schedule()
        self.models = tuple(models)
        self.step = 0
        self.guard = Guard(current_step=lambda: self.step)
        self.log = RunLog()
        self._forward = ForwardSampler(self.guard, self.thresholds.dead_samples)
        self._losses = LossReader(self._forward)
        self._optimizers = OptimizerRegistry()
        self._pending = _Pending()
        self.probes = Probes(PROBES, self)
        self._depth = 0  # of backward passes inside one another
        self._foreign = False  # whether the backward pass now running is of other models
        self._resumed = False  # whether an earlier `with` left its record
        self._stops: list[Callable[[], None]] = []
        self.layers = find_layers(self.models)
        self._watch_parameters()

    # Attaching and detaching ------------------------------------------------------------------

    def attach(self) -> None:
        """Start watching; a second call while attached changes nothing."""
        if self._stops:
            return
        self._resumed = bool(self.log.pulses.items)
        self.step = self.steps_seen
        self._optimizers.clear()
        self._forward.attach(self.layers, self.probes)
        self.probes.attach()
        wrap = self.guard.wrap
        self._stops = [
            watch_backward(
                BackwardWatcher(wrap(self._before_backward), wrap(self._after_backward))
            ),
            watch_optimizers(wrap(self._before_step), wrap(self._after_step)),
            self._forward.detach,
            self.probes.detach,
        ]

    def detach(self) -> None:
        """Stop watching and let go of all that belongs to the model's graph."""
        if self._stops and not self._optimizers and self._pending.losses:
            self.guard.wrap(self._close_step_without_optimizer)()
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._pending = _Pending()

    @property
    def steps_seen(self) -> int:
        """Steps completed so far."""
        pulses = self.log.pulses.items
        return pulses[-1].step + 1 if pulses else 0

    def series(self) -> pd.DataFrame:
        """The series so far; see `neuraldbg.series`."""
        return self.log.series()

    def _reached_by(self, root: Tensor) -> bool:
        """Whether a backward pass is of the watched models, as they are now."""
        return reaches(root, self._watched) or (
            self._refresh_layers() and reaches(root, self._watched)
        )

    def _refresh_layers(self) -> bool:
        """Take up layers and parameters that came since: lazy ones, and those of model surgery.

        Returns whether there were any.
        """
        current = {
            p for m in self.models for p in m.parameters() if not isinstance(p, Uninitialized)
        }
        if current == self._watched:
            return False
        known = {(layer.name, layer.module): layer for layer in self.layers}
        layers = []
        for fresh in find_layers(self.models):
            layer = known.get((fresh.name, fresh.module), fresh)
            layer.parameters = fresh.parameters
            layers.append(layer)
        self.layers = layers
        self._forward.watch(layers)
        self._watch_parameters()
        return True

    def _watch_parameters(self) -> None:
        self._with_parameters = [layer for layer in self.layers if layer.parameters]
        self._parameters = ParameterSampler(self._with_parameters)
        self._watched: set[Parameter] = {p for layer in self.layers for p in layer.parameters}

    # Backward ---------------------------------------------------------------------------------

    def _before_backward(self, roots: Sequence[Tensor]) -> None:
        self._depth += 1
        if self._depth > 1:
            return  # reentrant checkpointing runs passes of its own inside this one
        self._foreign = bool(roots) and not self._reached_by(roots[0])
        if self._foreign:
            return
        if not self._optimizers and self._pending.losses:
            self._close_step_without_optimizer()
        armed = self._forward.armed
        if armed:
            self._refresh_layers()
        self._optimizers.note_backward(self._parameters.unset_gradients if armed else None)
        value = self._losses.value(roots)
        self._pending.losses.append(value)
        if isinstance(value, float) and not math.isfinite(value) and roots:
            self.log.findings += self._losses.inspect_non_finite(
                roots[0], self.current_step(), self._with_parameters
            )
        if armed and roots:
            self._pending.expected, blocks = self._losses.read_anatomy(roots[0], self.step)
            self._pending.blocks += blocks
        self.probes.call("before_backward", roots)

    def _after_backward(self) -> None:
        self._depth -= 1
        if self._depth or self._foreign:
            return
        self.probes.call("after_backward")
        self._forward.release()
        if not self._optimizers and self._forward.armed:
            self._pending.blocks += self._collect_forward()
            self._pending.blocks.append(self._gradient_block(None))
            self._parameters.read_weights_before()
        if not self._optimizers:
            # Should no optimizer ever step, the next forward pass belongs to the next step.
            self._forward.arm(self.schedule.captures(self.step + 1))

    # Optimizer step ---------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        record = self._record_of(optimizer)
        if record is None:
            return
        self.step += self._optimizers.begins_step(record)
        self.probes.call("before_step", optimizer)
        if not self._capturing:
            return
        record.held = parameters_of(optimizer) & self._watched  # groups can be added at any time
        if not has_closure:
            self._pending.blocks.append(self._gradient_block(record))
        self._parameters.read_weights_before()

    def _after_step(self, optimizer: Optimizer) -> None:
        record = self._optimizers.get(optimizer)
        if record is None:
            return
        self.probes.call("after_step", optimizer)
        if self._capturing:
            blocks = self._pending.blocks
            if not any(block.kind is Kind.GRADIENT for block in blocks):
                blocks.append(self._gradient_block(record))
            blocks += self._collect_forward()
            blocks += self._weight_blocks(record)
            self._finish_frame(blocks)
        self._pulse(record.number, learning_rate(optimizer), record, optimizer)
        record.close_step()
        self._arm(self.current_step())

    def _record_of(self, optimizer: Optimizer) -> OptimizerRecord | None:
        """The record of an optimizer that matters to the watched models, None for others."""
        record = self._optimizers.get(optimizer)
        if record is not None:
            return record
        held = parameters_of(optimizer) & self._watched
        if not held and (self._optimizers or not self._gradients_are_fresh()):
            return None
        if not self._optimizers and not self._resumed:
            self._restart_with_optimizer()
        record = self._optimizers.add(optimizer, held)
        record.backward_calls = len(self._pending.losses)
        return record

    def _gradients_are_fresh(self) -> bool:
        """Whether a backward pass since the last step has reached the watched parameters."""
        return bool(self._pending.losses) and any(p.grad is not None for p in self._watched)

    def _concerned(self, record: OptimizerRecord | None) -> list[int]:
        """Positions of the layers that a step concerns: all but those of other optimizers."""
        if len(self._optimizers) <= 1:
            return list(range(len(self._with_parameters)))
        elsewhere = self._optimizers.held_by_others(record)
        return [
            position
            for position, layer in enumerate(self._with_parameters)
            if not all(p in elsewhere for p in layer.parameters)
        ]

    # Steps without an optimizer -----------------------------------------------------------------

    def _close_step_without_optimizer(self) -> None:
        """A backward call begins and no optimizer ever stepped: the last call was a step."""
        if self._pending.blocks:
            self._finish_frame(self._pending.blocks + self._weight_blocks(None))
        self._pulse(0, math.nan, None, None)
        self.step += 1

    def _restart_with_optimizer(self) -> None:
        """The first optimizer steps: backward calls before it were micro-batches of its step."""
        if self.step > _MOST_MICRO_BATCHES:
            return  # a loop without an optimizer that takes one up later
        if self.step:
            before = [pulse.loss for pulse in self.log.pulses.items]
            self._pending.losses = [*before, *self._pending.losses]
            self.log.clear()
            self.step = 0
        self._pending.blocks = [b for b in self._pending.blocks if b.kind is not Kind.GRADIENT]

    # Blocks -------------------------------------------------------------------------------------

    def _gradient_block(self, record: OptimizerRecord | None) -> Block:
        neighbours = (self.step - 1, self.step + 1)
        paired = any(self.schedule.captures(step) for step in neighbours if step >= 0)
        columns = self._parameters.read_gradients(self.step, paired)
        return self._block(Kind.GRADIENT, columns, self._concerned(record))

    def _block(self, kind: Kind, columns: Columns, rows: list[int]) -> Block:
        if len(rows) == len(self._with_parameters):
            return Block(self.step, kind, self._with_parameters, columns)
        layers = [self._with_parameters[row] for row in rows]
        return Block(
            self.step, kind, layers, {name: values[rows] for name, values in columns.items()}
        )

    def _collect_forward(self) -> list[Block]:
        layers, columns, entries, inputs = self._forward.collect()
        inputs["target"] = np.zeros(len(entries))
        return [
            Block(self.step, Kind.OUTPUT, layers, columns),
            Block(self.step, Kind.INPUT, entries, inputs),
        ]

    def _weight_blocks(self, record: OptimizerRecord | None) -> list[Block]:
        if not self._parameters.has_weights_before:
            return []  # the layers were changed since
        weight, update = self._parameters.read_weights_after()
        held = self._optimizers.held()
        weight["in_optimizer"] = np.array(
            [
                float(any(p in held for p in layer.parameters)) if record else math.nan
                for layer in self._with_parameters
            ]
        )
        rows = self._concerned(record)
        return [
            self._block(Kind.PARAMETER, weight, rows),
            self._block(Kind.UPDATE, update, rows),
        ]

    def _finish_frame(self, blocks: list[Block]) -> None:
        blocks += [block for deferred in self.probes.frame() for block in deferred.now()]
        for block in blocks:
            block.step = self.step
        self.log.add_frame(blocks)

    def _pulse(
        self,
        number: int,
        rate: float,
        record: OptimizerRecord | None,
        optimizer: Optimizer | None,
        applied: bool = True,
    ) -> None:
        pending, self._pending = self._pending, _Pending()
        self.log.add_pulse(
            Pulse(
                step=self.step,
                optimizer=number,
                loss=mean_loss(pending.losses),
                expected=pending.expected,
                learning_rate=rate,
                micro_batches=len(pending.losses),
                gradient_kept=record.gradient_kept() if record else math.nan,
                applied=applied,
                loss_facts=self.probes.loss_facts(),
                optimizer_facts=self.probes.optimizer_facts(optimizer),
            )
        )

    @property
    def _capturing(self) -> bool:
        """Whether the step now running is captured."""
        return self._forward.armed or bool(self._pending.blocks)

    # What probes see ----------------------------------------------------------------------------

    @property
    def layers_with_parameters(self) -> Sequence[Layer]:
        """The watched layers that own parameters."""
        return self._with_parameters

    @property
    def watched_parameters(self) -> set[Parameter]:
        """All parameters of the watched layers."""
        return self._watched

    @property
    def armed(self) -> bool:
        """Whether the step now running is captured."""
        return self._capturing

    @property
    def producers(self) -> Mapping[Node, Layer]:
        """The `grad_fn` of each sampled output of the pass now running, with its layer."""
        return self._forward.producers

    @property
    def batch(self) -> Mapping[Layer, Tensor]:
        """The raw tensors that entered the models in the pass now running, by layer."""
        return self._forward.batch

    @property
    def saved_tensors_are_packed(self) -> bool:
        """Whether saved values must not be read, since that would run code of the model's."""
        return self._forward.uses_saved_tensor_hooks

    def current_step(self) -> int:
        """The step that the pass now running belongs to."""
        return self.step + self._optimizers.all_stepped

    def skip_step(self, optimizer: Optimizer) -> None:
        """Close the step now running as one that an optimizer was kept from applying."""
        record = self._record_of(optimizer)
        if record is None:
            return
        self.step += self._optimizers.begins_step(record)
        if self._capturing:
            self._parameters.read_weights_before()
            blocks = [*self._pending.blocks, self._gradient_block(record), *self._collect_forward()]
            self._finish_frame(blocks + self._weight_blocks(record))
        self._pulse(record.number, learning_rate(optimizer), record, optimizer, applied=False)
        record.close_step()
        self._arm(self.current_step())

    def _arm(self, step: int) -> None:
        self._forward.arm(self.schedule.captures(step))
