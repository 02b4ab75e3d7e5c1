"""The probe: one kind of evidence, gathered along the steps of a run.

The recorder follows the loop and says where a step stands; each probe looks at what it needs
there and leaves rows of the series. A new kind of evidence is a file in `probes/` and an entry in
`PROBES`; the recorder does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.guard import Guard
from neuraldbg.capture.layers import Layer
from neuraldbg.thresholds import Thresholds

if TYPE_CHECKING:
    from neuraldbg.capture.graph_walk import Node

Facts = Mapping[str, float | str]
"""Columns of a single row: numbers by statistic or flag, text for ``detail``."""


class RunView(Protocol):
    """What a probe may see of the run it is part of.

    Attributes:
        models: The watched models.
        thresholds: Limits.
        guard: Runs callbacks that a probe registers itself, so that they cannot raise.
        layers: The watched layers.
        layers_with_parameters: Those that own parameters.
        watched_parameters: All of these parameters.
        armed: Whether the step now running is captured.
        thorough: Whether it is looked at with all there is: so are the first captured steps, and
            of later ones every so many.
        producers: The `grad_fn` of each sampled output of the pass now running, with its layer.
        passes: Backward passes of the watched models so far, the one now running included.
        batch: The raw tensors that entered the models in the pass now running.
        saved_tensors_are_packed: Whether saved values must not be read (checkpointing).
    """

    models: tuple[nn.Module, ...]
    thresholds: Thresholds
    guard: Guard

    @property
    def layers(self) -> Sequence[Layer]: ...  # noqa: D102
    @property
    def layers_with_parameters(self) -> Sequence[Layer]: ...  # noqa: D102
    @property
    def watched_parameters(self) -> set[Parameter]: ...  # noqa: D102
    @property
    def armed(self) -> bool: ...  # noqa: D102
    @property
    def thorough(self) -> bool: ...  # noqa: D102
    @property
    def producers(self) -> Mapping[Node, Layer]: ...  # noqa: D102
    @property
    def passes(self) -> int: ...  # noqa: D102
    @property
    def batch(self) -> Mapping[Layer, Tensor]: ...  # noqa: D102
    @property
    def saved_tensors_are_packed(self) -> bool: ...  # noqa: D102

    def current_step(self) -> int:
        """The step that the pass now running belongs to."""

    def hook_all_layers(self, wanted: bool) -> None:
        """Have all layers' calls reported though no step is captured, or no longer."""

    def log_rows(self, blocks: Sequence[Block]) -> None:
        """Log rows that belong to no captured step, with steps of their own."""

    def skip_step(self, optimizer: Optimizer) -> None:
        """Close the step now running as one that an optimizer was kept from applying."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Rows that can be made once some tensors are on the host.

    On the CPU that is at once; on an accelerator all tensors of a captured step leave in one
    asynchronous copy, and the rows are made later, in order.

    Attributes:
        make: Makes the rows from the tensors, given as float32 arrays of the tensors' shapes.
        tensors: Detached tensors that are not written to again.
    """

    make: Callable[[list[np.ndarray]], Iterable[Block]]
    tensors: Sequence[Tensor] = field(default_factory=tuple)

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Deferred:
        """Rows that are made already."""
        return cls(lambda _: blocks)

    def now(self) -> list[Block]:
        """The rows, at once: waits for the device where the tensors are on one."""
        return list(self.make([_to_array(tensor) for tensor in self.tensors]))


def _to_array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().to("cpu", torch.float32).numpy())


class Probe:
    """Base of all probes: every method may be left as it is, and those are never called.

    A probe lives as long as its run. None of its methods may change what it is shown, draw random
    numbers, or make an accelerator wait: keep detached tensors and hand them out by `frame`.

    Attributes:
        every_step: Whether the methods are called at every step, or (default) at captured ones.
            May change from step to step: while it is true nothing can rest.
        rarely: Whether they are called only at captured steps that are looked at thoroughly; what
            it tells is taken to hold until it tells otherwise.
        when_broken: Whether `before_backward` is called at any step whose loss is not finite, and
            `after_backward` (just before the optimizer steps) where the gradient is not.
        facts_at_rest: Whether `optimizer_facts` is asked for at every step, captured or not, with
            no other method called there. It must cost a few microseconds at most.
        sees_evaluations: Whether it is told of evaluations at any step, captured or not.
    """

    every_step: bool = False
    rarely: ClassVar[bool] = True
    when_broken: ClassVar[bool] = False
    facts_at_rest: ClassVar[bool] = False
    sees_evaluations: ClassVar[bool] = False

    def __init__(self, run: RunView) -> None:
        self.run = run

    def attach(self) -> None:
        """The run begins, or begins again."""

    def detach(self) -> None:
        """The run ends: undo all that `attach` did and let go of the model's tensors."""

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:
        """A watched layer was called in training, in a pass that is captured."""

    def on_evaluation(self, layer: Layer, args: Any, output: Any) -> None:
        """A watched layer was called without gradients or in eval mode.

        Between captured steps that is told of the first layers only. A call in eval mode with
        gradients can still belong to training: then a backward pass follows.
        """

    def after_evaluation(self, was_one: bool) -> None:
        """What began as an evaluation is over.

        Args:
            was_one: Whether training went on, or the run ended; otherwise a backward pass
                followed, so that it was part of training.
        """

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """A backward pass of the watched models begins; the graph is intact."""

    def after_backward(self) -> None:
        """It ended, or failed."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer that holds watched parameters is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It stepped."""

    def frame(self) -> Iterable[Deferred]:
        """Rows about the captured step that now ends, each layer and kind in one of them."""
        return ()

    def loss_facts(self) -> Facts:
        """Columns of the row (kind loss) of the step that now ends."""
        return {}

    def coverage(self) -> Mapping[tuple[str, str | None], str]:
        """What could not be observed and why, by (what, layer); layer None for the run."""
        return {}

    def optimizer_facts(self, optimizer: Optimizer | None) -> Facts:  # noqa: ARG002
        """Columns of the row (kind optimizer) of the step that now ends."""
        return {}


class Probes:
    """All probes of a run, called only where they have something to do."""

    def __init__(self, kinds: Sequence[type[Probe]], run: RunView) -> None:
        self._run = run
        self.probes: list[Probe] = []
        for kind in kinds:  # one that cannot be made must not keep the others from being
            run.guard.wrap(lambda kind=kind: self.probes.append(kind(run)), kind.__name__)()
        self._last_facts: dict[str, float | str] | None = None
        self._calls = {name: self._guarded(name) for name in _CALLBACKS}
        self._due: dict[str, list[Callable[..., None]]] = {}
        self.select(armed=True, thorough=True)
        self._frames = self._guarded("frame", lambda found, rows: found.extend(rows))
        self._coverage = self._guarded("coverage", lambda found, seen: found.update(seen))
        self._facts = {
            name: self._guarded(name, lambda found, facts: found.update(facts))
            for name in ("loss_facts", "optimizer_facts")
        }

    def _guarded(
        self, name: str, gather: Callable[[Any, Any], None] | None = None
    ) -> list[tuple[Probe, Callable[..., None]]]:
        """The methods of a name that probes implement, unable to raise.

        Args:
            name: Of the method.
            gather: Adds what a method returns to the collection that is given as first argument;
                None for methods that return nothing.
        """
        found = []
        for probe in self.probes:
            if getattr(type(probe), name) is not getattr(Probe, name):
                method = getattr(probe, name)
                callback = method if gather is None else _gathering(method, gather)
                guarded = self._run.guard.wrap(callback, f"{type(probe).__name__}.{name}")
                found.append((probe, guarded))
        return found

    def has(self, name: str) -> bool:
        """Whether any probe implements a callback."""
        return bool(self._calls[name])

    def call(self, name: str, *args: Any) -> None:
        """Call all probes that implement a callback and are due."""
        for callback in self._due[name]:
            callback(*args)

    def select(self, armed: bool, thorough: bool) -> None:
        """Decide which probes are called until the next call of this.

        Args:
            armed: Whether the coming step is captured.
            thorough: Whether it is looked at thoroughly.
        """
        for name, calls in self._calls.items():
            self._due[name] = [
                callback
                for probe, callback in calls
                if probe.every_step or (armed and (thorough or not probe.rarely))
            ]

    def call_broken(self, name: str, *args: Any) -> None:
        """Call those that want to know of values that are not finite at any step."""
        for probe, callback in self._calls[name]:
            if probe.when_broken and not probe.every_step:
                callback(*args)

    def call_on_evaluation(self, name: str, *args: Any) -> None:
        """Call those that are due or see all evaluations."""
        armed = self._run.armed
        for probe, callback in self._calls[name]:
            if armed or probe.every_step or probe.sees_evaluations:
                callback(*args)

    @property
    def restless(self) -> bool:
        """Whether any probe is to be called at every step."""
        return any(probe.every_step for probe in self.probes)

    def attach(self) -> None:
        """Tell all that the run begins."""
        for _, callback in self._calls["attach"]:
            callback()

    def detach(self) -> None:
        """Tell all that the run ends."""
        for _, callback in self._calls["detach"]:
            callback()

    def frame(self, thorough: bool) -> list[Deferred]:
        """What all have to say about the captured step that now ends.

        Args:
            thorough: Whether it was looked at thoroughly.
        """
        found: list[Deferred] = []
        for probe, callback in self._frames:
            if thorough or not probe.rarely:
                callback(found)
        return found

    def coverage(self) -> dict[tuple[str, str | None], str]:
        """What no probe could observe, and why."""
        found: dict[tuple[str, str | None], str] = {}
        for _, callback in self._coverage:
            callback(found)
        return found

    def loss_facts(self) -> dict[str, float | str]:
        """The columns that all give to the loss's row."""
        return self._gather_facts("loss_facts")

    def optimizer_facts(self, optimizer: Optimizer | None) -> dict[str, float | str]:
        """The columns that all give to the optimizer's row."""
        return self._gather_facts("optimizer_facts", optimizer)

    def facts_at_rest(self, optimizer: Optimizer | None) -> dict[str, float | str] | None:
        """The columns of the optimizer's row at a step at which all else rests, None if none."""
        found: dict[str, float | str] = {}
        for probe, callback in self._facts["optimizer_facts"]:
            if probe.facts_at_rest:
                callback(found, optimizer)
        if found == self._last_facts:
            return self._last_facts  # one object for all steps that are alike
        self._last_facts = found
        return found

    def _gather_facts(self, name: str, *args: Any) -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        armed = self._run.armed
        for probe, callback in self._facts[name]:
            if armed or probe.every_step or probe.facts_at_rest:
                callback(found, *args)
        return found


_CALLBACKS = (
    "attach", "detach", "on_forward", "on_evaluation", "after_evaluation", "before_backward",
    "after_backward", "before_step", "after_step",
)  # fmt: skip


def _gathering(
    method: Callable[..., Any], gather: Callable[[Any, Any], None]
) -> Callable[..., None]:
    return lambda found, *args: gather(found, method(*args))
