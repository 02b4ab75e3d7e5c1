"""The recorder: follows a training loop through its hooks and keeps the run's series.

One step, as the hooks see it: forward (samples of outputs), backward (loss, its anatomy, whether
gradients were reset), the optimizer's step (gradients before it, weights on both sides), then the
statistics of all that at once. A loop without an optimizer is followed by its backward calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.parameter import UninitializedParameter as Uninitialized
from torch.optim import Optimizer

from neuraldbg.capture.backward_watch import BackwardWatcher, watch_backward
from neuraldbg.capture.blocks import Block
from neuraldbg.capture.budget import Budget
from neuraldbg.capture.cost import Cost
from neuraldbg.capture.coverage import build_coverage
from neuraldbg.capture.event_detection import detect_events
from neuraldbg.capture.event_ledger import EventLedger
from neuraldbg.capture.forward_sampler import ForwardSampler
from neuraldbg.capture.gradient_norm import GradientNorms
from neuraldbg.capture.graph_walk import Node, reaches
from neuraldbg.capture.guard import Guard
from neuraldbg.capture.layers import Layer, find_layers
from neuraldbg.capture.local_shards import shard_count, stored_parameters
from neuraldbg.capture.loss_reader import Loss, LossReader, loss_value, mean_loss
from neuraldbg.capture.optimizer_watch import (
    OptimizerRecord,
    OptimizerRegistry,
    learning_rate,
    parameters_of,
    watch_optimizers,
)
from neuraldbg.capture.parameter_rows import ParameterRows
from neuraldbg.capture.probe import Deferred, Facts, Probes
from neuraldbg.capture.probes import PROBES
from neuraldbg.capture.probes.metrics import Metrics
from neuraldbg.capture.ranks import current_rank, describe_rank
from neuraldbg.capture.run_log import Pulse, RunLog
from neuraldbg.capture.schedule import Schedule
from neuraldbg.capture.transfer import Transfers
from neuraldbg.capture.trip import Trip
from neuraldbg.event_table import build_event_table, events_from_table
from neuraldbg.thresholds import Thresholds

_THOROUGH_STEPS = 64
"""Captured steps from the start that are looked at with all there is."""
_THOROUGH_PERIOD = 16
"""Of later captured steps, the distance between those that are."""
_MOST_MICRO_BATCHES = 64
"""Backward calls that may come before the first optimizer step and still belong to it."""


@dataclass(slots=True)
class _Pending:
    """What backward passes have shown since the last optimizer step."""

    losses: list[Loss] = field(default_factory=list)
    rows: list[Deferred] = field(default_factory=list)
    gradients: list[Deferred] = field(default_factory=list)
    norm: float | Callable[[], float] | None = None


class Recorder:
    """Watches models through one run and answers with the series of their statistics.

    Args:
        models: The models whose layers are watched.
        thresholds: Limits at which statistics become events.
        schedule: Which steps are captured: a fixed schedule, or a budget to keep within.

    Raises:
        TypeError: something given is not a module.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        thresholds: Thresholds | None = None,
        schedule: Schedule | Budget | None = None,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.schedule = schedule or Budget()
        self.models = tuple(models)
        self.step = 0
        self.guard = Guard(current_step=lambda: self.step)
        self.log = RunLog(before_thinning=self._enter_events)
        self._ledger = EventLedger()
        self._transfers = Transfers(self.log.add_frame)
        self._trip = Trip()
        self._forward = ForwardSampler(self.guard, self.thresholds.dead_samples)
        self._losses = LossReader(self._forward)
        self._optimizers = OptimizerRegistry()
        self.probes = Probes(PROBES, self)
        self._pending = _Pending()
        self._depth = 0  # of backward passes inside one another
        self._foreign = False  # whether the backward pass now running is of other models
        self._foreign_seen = False  # whether there ever was one
        self._thorough = True  # whether the step now running is looked at with all there is
        self._resting = False  # whether only loss and norm are looked at until the next step
        self._passes = 0
        self._rank = current_rank()
        self._resumed = False  # whether an earlier `with` left its record
        self._stops: list[Callable[[], None]] = []
        self._captured_steps = 0
        self._run_seconds = 0.0
        self._entered: float | None = None  # when the run's clock was started, while it runs
        self._step_began = (0.0, 0.0)  # by the clock, and by the guard's
        self.layers = find_layers(self.models)
        self._watch_parameters()
        self._before_run = self.guard.seconds  # spent on making the probes

    # Attaching and detaching ------------------------------------------------------------------

    def attach(self) -> None:
        """Start watching; a second call while attached changes nothing."""
        if self._stops:
            return
        self._entered = time.perf_counter()
        self._resumed = bool(self.log.pulses.items)
        self._rank = current_rank()
        self.log.rank = self._rank.number
        self.step = self.steps_seen
        self._optimizers.clear()
        self._forward.attach(self.models, self.layers, self.probes)
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
        self._step_began = (time.perf_counter(), self.guard.seconds)

    def detach(self) -> None:
        """Stop watching and let go of all that belongs to the model's graph."""
        if not self._stops:
            return
        if not self._optimizers and self._pending.losses:
            self.guard.wrap(self._close_step_without_optimizer)()
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._pending = _Pending()
        self.guard.wrap(self._transfers.settle)()

    def stop_clock(self) -> None:
        """End the time of the run, when all that has to be done at its end is done."""
        if self._entered is not None:
            self._run_seconds += time.perf_counter() - self._entered
        self._entered = None

    def record(self, metrics: Mapping[str, object]) -> None:
        """Keep numbers that only the training script knows, with the step they belong to.

        Raises:
            RuntimeError: nothing was watched yet.
        """
        if not self._stops and not self.steps_seen:
            raise RuntimeError(
                "record() was called before the run began: call it inside (or after) "
                "`with NeuralDbg(model) as dbg:`"
            )
        step = self.current_step() if self._stops else self.steps_seen
        for probe in self.probes.probes:
            if isinstance(probe, Metrics):
                self.guard.wrap(probe.record, "record")(step, metrics)

    @property
    def steps_seen(self) -> int:
        """Steps completed so far."""
        pulses = self.log.pulses.items
        return pulses[-1].step + 1 if pulses else 0

    def series(self) -> pd.DataFrame:
        """The series so far; see `neuraldbg.series`."""
        self._transfers.settle()
        return self.log.series()

    def events(self, series: pd.DataFrame) -> pd.DataFrame:
        """The event table so far, of the series so far."""
        found = detect_events(series, self.thresholds, self.guard.faults)
        return build_event_table(self._ledger.merge(events_from_table(found)))

    def _enter_events(self) -> None:
        """Enter the spans that the log still shows in full, before it is thinned."""
        found = events_from_table(detect_events(self.log.series(), self.thresholds))
        self._ledger.enter(found, self.log.frames.items[-1][0].step)

    def coverage(self, series: pd.DataFrame) -> pd.DataFrame:
        """What of the run was observed, of the series so far; see `build_coverage`."""
        reasons = {**self._forward.coverage(), **self.probes.coverage()}
        reasons |= {
            (place, None): "gave up after failing again and again; see faults"
            for place in self.guard.given_up
        }
        sharded = any(shard_count(p) > 1 for p in self._watched)
        if told := describe_rank(self._rank, sharded):
            reasons["other ranks", None] = told
        return build_coverage(series, self.layers, self.steps_seen, reasons)

    @property
    def cost(self) -> Cost:
        """What capture has cost so far."""
        run = self._run_seconds
        if self._entered is not None:
            run += time.perf_counter() - self._entered
        return Cost(
            seconds=self.guard.seconds - self._before_run,
            run_seconds=run,
            steps=self.steps_seen,
            captured_steps=self._captured_steps,
            period=self.schedule.period_at(self.steps_seen),
        )

    # What probes see ----------------------------------------------------------------------------

    @property
    def layers_with_parameters(self) -> Sequence[Layer]:
        """The watched layers that own parameters."""
        return self._parameters.layers

    @property
    def watched_parameters(self) -> set[Parameter]:
        """All parameters of the watched layers."""
        return self._watched

    @property
    def armed(self) -> bool:
        """Whether the step now running is captured."""
        return self._forward.armed or bool(self._pending.rows or self._pending.gradients)

    @property
    def thorough(self) -> bool:
        """Whether the step now running is looked at with all there is."""
        return self._thorough

    @property
    def producers(self) -> Mapping[Node, Layer]:
        """The `grad_fn` of each sampled output of the pass now running, with its layer."""
        return self._forward.producers

    @property
    def passes(self) -> int:
        """Backward passes of the watched models so far, the one now running included."""
        return self._passes

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

    def hook_all_layers(self, wanted: bool) -> None:
        """Have all layers' calls reported to the probes though no step is captured, or no more."""
        self._forward.hook_all(wanted)

    def log_rows(self, blocks: Sequence[Block]) -> None:
        """Log rows that belong to no captured step, with steps of their own."""
        self.log.add_rows(blocks)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Close the step now running as one that an optimizer was kept from applying."""
        record = self._record_of(optimizer)
        if record is None:
            return
        self.step += self._optimizers.begins_step(record)
        self._read_gradients(record)
        if self.armed:
            self._parameters.sampler.read_weights_before()
        self._close_step(record, optimizer, applied=False)

    # Layers and parameters ------------------------------------------------------------------------

    def _reached_by(self, root: Tensor) -> bool:
        """Whether a backward pass is of the watched models, as they are now."""
        if reaches(root, self._watched):
            return True
        stand_ins = stored_parameters(self.models)
        if stand_ins and reaches(root, stand_ins):
            return True
        return self._refresh_layers() and reaches(root, self._watched)

    def _refresh_layers(self) -> bool:
        """Take up layers and parameters that came since: lazy ones, and those of model surgery.

        Returns whether there were any.
        """
        current = {
            p for m in self.models for p in m.parameters() if not isinstance(p, Uninitialized)
        }
        if current == self._watched:
            return False
        stored = stored_parameters(self.models)
        if stored and {stored.get(p, p) for p in current} == self._watched:
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
        self._parameters = ParameterRows(self.layers, self._optimizers)
        self._watched = {p for layer in self.layers for p in layer.parameters}
        self._norms = GradientNorms([p for layer in self.layers for p in layer.parameters])

    # Backward ---------------------------------------------------------------------------------

    def _before_backward(self, roots: Sequence[Tensor]) -> None:
        self._depth += 1
        if self._depth > 1:
            return  # reentrant checkpointing runs passes of its own inside this one
        # Between captured steps a pass that follows a forward pass of the models is theirs.
        sure = self._resting and self._forward.began and not self._foreign_seen
        self._foreign = not sure and bool(roots) and not self._reached_by(roots[0])
        if self._foreign:
            self._foreign_seen = True
            return
        self._passes += 1
        if self._resting:
            self._optimizers.note_backward(None)
            self._note_loss(roots)
            return
        if not self._optimizers and self._pending.losses:
            self._close_step_without_optimizer()
        armed = self._forward.armed
        thorough = armed and self._thorough
        if thorough:
            self._refresh_layers()
        unset = self._parameters.sampler.unset_gradients
        self._optimizers.note_backward(unset if thorough else None)
        if thorough and roots:
            self._losses.sample_functional_activations(roots[0])
        self.probes.call("before_backward", roots)
        self._note_loss(roots)

    def _note_loss(self, roots: Sequence[Tensor]) -> None:
        loss = loss_value(roots)
        self._pending.losses.append(loss)
        if type(loss) is float and loss - loss != 0.0 and not self.armed:
            self.probes.call_broken("before_backward", roots)

    def _after_backward(self) -> None:
        self._depth -= 1
        if self._depth or self._foreign:
            return
        if self._resting:
            self._forward.release()
            return
        self.probes.call("after_backward")
        self._forward.release()
        if self._optimizers:
            return
        if self._forward.armed:
            self._pending.rows.append(self._forward_rows())
            self._parameters.sampler.read_weights_before()
        self._read_gradients(None)
        # Should no optimizer ever step, the next forward pass belongs to the next step.
        self._arm(self.step + 1)

    # Optimizer step ---------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        record = self._record_of(optimizer)
        if record is None:
            return
        self.step += self._optimizers.begins_step(record)
        if not self._resting:
            self.probes.call("before_step", optimizer)
        if not has_closure:
            self._read_gradients(record)
        if self.armed and self._thorough:
            record.held = parameters_of(optimizer) & self._watched  # groups can grow at any time
            self._parameters.sampler.read_weights_before()

    def _after_step(self, optimizer: Optimizer) -> None:
        record = self._optimizers.get(optimizer)
        if record is None:
            return
        if not self._resting:
            self.probes.call("after_step", optimizer)
        if self._pending.norm is None:  # a closure made the gradients inside the step
            self._read_gradients(record)
        self._close_step(record, optimizer)

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

    # Steps without an optimizer -----------------------------------------------------------------

    def _close_step_without_optimizer(self) -> None:
        """A backward call begins and no optimizer ever stepped: the last call was a step."""
        self._close_step(None, None)
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
        self._pending.gradients.clear()
        self._pending.norm = None

    # The end of a step ----------------------------------------------------------------------------

    def _read_gradients(self, record: OptimizerRecord | None) -> None:
        """Read the gradients as they are now: all statistics if captured, else their norm."""
        pending = self._pending
        if self.armed:
            neighbours = (self.step - 1, self.step + 1)
            paired = self._thorough and any(
                self._captures(step) for step in neighbours if step >= 0
            )
            pending.gradients.append(self._parameters.gradient_rows(self.step, record, paired))
        if pending.norm is None:
            held, number = (record.held, record.number) if record else (self._watched, 0)
            pending.norm = self._norms.norm(held, number, exact=self.armed)
            norm = pending.norm
            if not self.armed and not callable(norm) and not math.isfinite(norm):
                self.probes.call_broken("after_backward")

    def _close_step(
        self, record: OptimizerRecord | None, optimizer: Optimizer | None, applied: bool = True
    ) -> None:
        """Log the step that ends, learn what it cost, and decide about the next."""
        captured = self.armed
        if captured:
            rows = self._pending.rows + self._pending.gradients
            if record is not None:
                rows.append(self._forward_rows())
            rows += self._parameters.weight_rows(self.step, record)
            self._transfers.send(self.step, rows + self.probes.frame(self._thorough))
            self._captured_steps += 1
        self._pulse(record, optimizer, applied)
        if record is not None:
            record.close_step()
        now, spent = time.perf_counter(), self.guard.seconds
        self.schedule.note_step(now - self._step_began[0], spent - self._step_began[1], captured)
        self._step_began = (now, spent)
        if record is not None:
            self._arm(self.current_step())

    def _pulse(
        self, record: OptimizerRecord | None, optimizer: Optimizer | None, applied: bool
    ) -> None:
        pending, self._pending = self._pending, _Pending()
        loss = mean_loss(pending.losses)
        norm = math.nan if pending.norm is None else pending.norm
        pulse = Pulse(
            self.step,
            record.number if record is not None else 0,
            loss,
            norm,
            learning_rate(optimizer) if optimizer is not None else math.nan,
            len(pending.losses),
            applied,
        )
        if not self._resting:
            pulse.loss_facts = self.probes.loss_facts()
            pulse.optimizer_facts = self._optimizer_facts(record, optimizer)
        else:
            pulse.optimizer_facts = self.probes.facts_at_rest(optimizer)
        self.log.add_pulse(pulse)
        if not callable(loss) and not callable(norm):
            self._trip.note(self.step, loss, norm)

    def _optimizer_facts(
        self, record: OptimizerRecord | None, optimizer: Optimizer | None
    ) -> Facts:
        kept = math.nan if record is None else record.gradient_kept()
        return {"gradient_kept": kept, **self.probes.optimizer_facts(optimizer)}

    def _forward_rows(self) -> Deferred:
        return self._forward.collect(self.step)

    def _captures(self, step: int) -> bool:
        return self._trip.active(step) or self.schedule.captures(step)

    def _arm(self, step: int) -> None:
        armed = self._captures(step)
        self._thorough = (
            self._captured_steps < _THOROUGH_STEPS or self._captured_steps % _THOROUGH_PERIOD == 0
        )
        self._forward.arm(armed, self._thorough)
        self.probes.select(armed, self._thorough)
        self._resting = not armed and bool(self._optimizers) and not self.probes.restless
