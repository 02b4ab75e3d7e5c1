"""Evaluations between training steps: their outputs, inputs and loss as a series of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.evaluation_loss import (
    OWN_LOSS,
    LossTally,
    TrainingLoss,
    own_loss,
    training_loss,
)
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.late_rows import LateRows
from neuraldbg.capture.layer_hook import LayerHook
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.loss_function_watch import LossCall, watch_loss_functions
from neuraldbg.capture.pace import Pace
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.sampling import Key, SampleBuffer, Samples, Snapshot
from neuraldbg.capture.statistics import summarise
from neuraldbg.series import DETAIL, Kind

_FIRST_PHASES = 64
"""Evaluations whose outputs are sampled one by one; later ones ever more sparsely: rollouts of
reinforcement learning are evaluations too, and there is one at every step."""
_FIRST_LOSSES = 192
_MOST_IN_VAIN = 3
"""Times that what began like an evaluation may turn out to be training (parts under `no_grad`,
checkpointing, models trained in eval mode) before it is no longer taken for one."""

_Opening = tuple[Layer, bool, bool]
"""How an evaluation begins: the layer called first, with gradients or not, in training mode."""


@dataclass(slots=True, eq=False)
class _Phase:
    """One evaluation, from its first pass to the next training pass.

    Attributes:
        step: Optimizer steps before it.
        opening: How it began.
        sampling: Whether outputs are sampled: in the first pass.
        passes: Passes through the model begun so far.
        called: Layers called in the first pass.
        losses: The losses seen.
    """

    step: int
    opening: _Opening
    sampling: bool
    passes: int = 1
    called: list[Layer] = field(default_factory=list)
    losses: LossTally = field(default_factory=LossTally)


class EvaluationPhase(Probe):
    """Rows with the flag `evaluation`: outputs and inputs of a first batch, and the mean loss.

    An evaluation begins with a call without gradients or in eval mode. It was one if the same
    layer is called for training again, or the run ends; it was training if a backward pass comes
    first. Then all of it is dropped.
    """

    rarely = False
    sees_evaluations: ClassVar[bool] = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._phase: _Phase | None = None
        self._training = TrainingLoss()
        self._rows = LateRows(run.log_rows)
        self._buffer = SampleBuffer()
        self._in_vain: dict[_Opening, int] = {}
        self._sampling_pace = Pace(_FIRST_PHASES)
        self._loss_pace = Pace(_FIRST_LOSSES)
        self._model_hooks: list[RemovableHandle] = []
        self._returns_loss = False
        self._stepped = False
        self._stop_watching: Callable[[], None] | None = None
        self._on_loss = self._note_loss_of(run.guard.wrap(self._note_loss))
        self._on_output = run.guard.wrap(self._note_output)

    # What the loop does ---------------------------------------------------------------------------

    def attach(self) -> None:
        """Watch the loss functions."""
        # For the whole run: `cross_entropy(model(x), y)` looks the function up before it calls
        # the model, so the first batch of an evaluation would be missed otherwise.
        self._stop_watching = watch_loss_functions(self._on_loss)

    def on_evaluation(self, layer: Layer, args: Any, output: Any) -> None:
        """Open an evaluation or follow the one that is open."""
        phase = self._phase
        with_gradient = torch.is_grad_enabled()
        if phase is not None and with_gradient and phase.opening[:2] == (layer, False):
            self._close(confirmed=True)  # a model that trains in eval mode trains again
            phase = None
        if phase is None:
            training = layer.module is not None and layer.module.training
            opening = (layer, with_gradient, training)
            if self._in_vain.get(opening, 0) >= _MOST_IN_VAIN:
                return
            phase = self._open(opening)
        elif layer is phase.opening[0]:
            phase.passes += 1
            self._end_sampling(phase)
        if phase.sampling and layer not in phase.called:
            # Buffers made in inference mode could not be written to outside it.
            with torch.inference_mode(False), torch.no_grad():
                self._sample(phase, layer, args, output)

    def after_evaluation(self, was_one: bool) -> None:
        """Keep it, or drop it as a part of training."""
        self._close(was_one)

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Learn what the training loss is."""
        if roots and roots[0].grad_fn is not None:
            self._training = training_loss(roots[0])

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Log what can be logged by now."""
        # Rows logged before the first step are lost when it turns out to be of micro-batches.
        self._stepped = True
        self._rows.log_ready()

    def frame(self) -> Iterable[Deferred]:
        """Nothing of its own; what lies on an accelerator travels with this step."""
        return self._rows.board() if self._stepped else ()

    def detach(self) -> None:
        """The run ends: what is still open was an evaluation."""
        self._close(confirmed=True)
        self._rows.log_all()
        self._unhook_models()
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
        self._buffer = SampleBuffer()

    # One evaluation -------------------------------------------------------------------------------

    def _open(self, opening: _Opening) -> _Phase:
        sampling = self._sampling_pace.is_due()
        phase = self._phase = _Phase(self.run.current_step(), opening, sampling)
        if not self._model_hooks:
            for model in self.run.models:
                hook = LayerHook(Layer("", model), self._on_output)
                self._model_hooks.append(model.register_forward_hook(hook))
        if sampling:
            self.run.hook_all_layers(True)
        return phase

    def _end_sampling(self, phase: _Phase) -> None:
        if phase.sampling:
            phase.sampling = False
            self.run.hook_all_layers(False)

    def _close(self, confirmed: bool) -> None:
        phase, self._phase = self._phase, None
        if phase is None:
            return
        self._end_sampling(phase)
        if not self._returns_loss:
            self._unhook_models()
        snapshot = self._buffer.drain()
        if not confirmed:
            self._in_vain[phase.opening] = self._in_vain.get(phase.opening, 0) + 1
            return
        if snapshot.keys:
            self._rows.add(_sample_rows(phase.step, snapshot.kept()))
        loss = phase.losses.result(self._training)
        if loss is not None and self._loss_pace.is_due():
            self._rows.add(_loss_row(phase.step, *loss))
        if self._stepped:
            self._rows.log_ready()

    def _unhook_models(self) -> None:
        for handle in self._model_hooks:
            handle.remove()
        self._model_hooks.clear()

    def _sample(self, phase: _Phase, layer: Layer, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        previous = phase.called[-1] if phase.called else None
        phase.called.append(layer)
        given = first_tensor(args) if previous is None else None
        if given is not None and given.dim() and given.numel():
            self._buffer.copy((layer, "input"), given, layer.unit_axis(given.dim(), None))
        if tensor.dim() and tensor.numel():
            self._buffer.copy((layer, "output"), tensor, layer.unit_axis(tensor.dim(), previous))

    def _note_loss_of(self, note: LossCall) -> LossCall:
        """Calls in training, which are most, are passed over at once."""

        def noted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if self._phase is not None:
                note(name, args, kwargs, result)

        return noted

    def _note_loss(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if self._phase is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._phase.losses.note(name, args, kwargs, result, self._phase.passes)

    def _note_output(self, model: Layer, args: Any, output: Any) -> None:  # noqa: ARG002
        loss = own_loss(output) if self._phase is not None else None
        if self._phase is not None and loss is not None:
            self._returns_loss = True
            with torch.inference_mode(False), torch.no_grad():
                self._phase.losses.add(OWN_LOSS, loss)


def _sample_rows(step: int, snapshot: Snapshot) -> Deferred:
    def make(arrays: list[np.ndarray]) -> list[Block]:
        samples = snapshot.samples(arrays[0])
        return [
            _rows_of(step, kind, samples, summarise(samples))
            for kind in (Kind.OUTPUT, Kind.INPUT)
            if any(key[1] == kind.value for key in samples.keys)
        ]

    return Deferred(make, (snapshot.values,))


def _rows_of(step: int, kind: Kind, samples: Samples, summary: dict[str, np.ndarray]) -> Block:
    chosen: list[tuple[int, Key]] = [
        (row, key) for row, key in enumerate(samples.keys) if key[1] == kind.value
    ]
    rows = [row for row, _ in chosen]
    columns = {name: values[rows] for name, values in summary.items()}
    columns["evaluation"] = np.ones(len(rows))
    if kind is Kind.INPUT:
        columns["target"] = np.zeros(len(rows))
    return Block(step, kind, [key[0] for _, key in chosen], columns)


def _loss_row(step: int, name: str, value: float | Tensor, comparable: bool) -> Deferred:
    def make(arrays: list[np.ndarray]) -> list[Block]:
        number = float(arrays[0]) if isinstance(value, Tensor) else value
        columns = {
            "value": np.array([number]),
            "comparable": np.array([float(comparable)]),
            "evaluation": np.ones(1),
            DETAIL: np.array([name], dtype=object),
        }
        return [Block(step, Kind.LOSS, [None], columns)]

    return Deferred(make, (value,) if isinstance(value, Tensor) else ())
