"""The layers of one run that are inside regions compiled by `torch.compile`.

On captured steps the graph of a region is run once more before its compiled code, without
gradients, for the values of its layers; see `neuraldbg.capture.compiled_graph`. Dropout draws other
masks there than in the compiled code, as it does in an eager run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuraldbg.capture.compilation_watch import (
    CompilationWatcher,
    CompiledRegion,
    LayerIndex,
    watch_compilation,
    watched_graphs,
)
from neuraldbg.capture.compiled_cache import forget_compiled
from neuraldbg.capture.guard import Guard
from neuraldbg.capture.layers import Layer
from neuraldbg.series import Kind


class Sampler(Protocol):
    """What takes the values of compiled layers.

    Attributes:
        armed: Whether values are wanted now.
    """

    armed: bool

    def hide_hooks(self) -> None:
        """Remove the hooks while something is compiled."""

    def show_hooks(self) -> None:
        """Put them back."""

    def leave_unhooked(self, layers: Iterable[Layer]) -> None:
        """Hook these layers no more."""

    def enter_compiled(self, entries: Sequence[tuple[Layer, Tensor]]) -> None:
        """Compiled code of the models begins a training pass, or goes on with one.

        Args:
            entries: The layers that read what the code was called with, and what that is.
        """

    def sample_compiled(self, layer: Layer, value: Tensor, entry: Tensor | None, cut: bool) -> None:
        """Take the output of a layer.

        Args:
            layer: The layer.
            value: Its output.
            entry: Its input where that asks for no gradient.
            cut: Whether its output asks for none.
        """

    def sample_function(
        self, layer: Layer, value: Tensor, bounds: tuple[float, float] | None
    ) -> None:
        """Take the result of an activation that a function applied to a layer's output."""


class CompiledRegions:
    """Follows the compiled code that runs a run's layers.

    Args:
        guard: Wraps every callback.
        sampler: Takes the values.
    """

    def __init__(self, guard: Guard, sampler: Sampler) -> None:
        self._sampler = sampler
        self._models: Sequence[nn.Module] = ()
        self._index = LayerIndex()
        self._watcher = CompilationWatcher(
            guard.wrap(sampler.hide_hooks), guard.wrap(sampler.show_hooks), guard.wrap(self._runs)
        )
        self._stop: Any = None
        self._attached = self._unknown = False
        self._seen: set[Layer] = set()
        self._obstacles: dict[Layer, str] = {}
        self._ensure = guard.wrap(self._begin, "CompiledRegions.ensure")

    def attach(self, models: Sequence[nn.Module], layers: Sequence[Layer]) -> None:
        """Follow compiled code from now on."""
        self._models = models
        self._attached = True
        self.watch(layers)
        self.ensure()

    def watch(self, layers: Sequence[Layer]) -> None:
        """Follow these layers instead of those before."""
        self._index = LayerIndex.of(layers)

    def ensure(self) -> None:
        """Begin where the compiler came into use since; else does nothing."""
        if self._stop is None and self._attached and "torch._dynamo" in sys.modules:
            self._ensure()

    def _begin(self) -> None:
        if not self._unknown:
            self._stop = watch_compilation(self._watcher)
            self._unknown = self._stop is None
            if not self._unknown:
                forget_compiled(self._models, watched_graphs())

    def detach(self) -> None:
        """Stop following; compiled code then runs as if nobody had watched."""
        self._attached = False
        if self._stop is not None:
            self._stop()
            self._stop = None

    def coverage(self) -> dict[tuple[str, str | None], str]:
        """What of compiled layers is not observed, by (what, layer), and why."""
        inside = "inside a region compiled by torch.compile"
        found: dict[tuple[str, str | None], str] = {
            (Kind.OUTPUT_GRADIENT, layer.name): inside for layer in self._seen
        }
        for layer, why in self._obstacles.items():
            found[Kind.OUTPUT, layer.name] = f"{inside}: {why}"
        if self._unknown:
            found["compiled regions", None] = "this version of PyTorch cannot be followed there"
        return found

    def _runs(self, region: CompiledRegion, args: Sequence[Any]) -> None:
        """Compiled code is about to run."""
        # A recompute of activation checkpointing runs inside a backward pass.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if not region.holds(args, self._index):
            return
        if _hooks_are_checked():
            present = region.layers(args, self._index)
            self._sampler.leave_unhooked(layer for layer in present if layer is not None)
        entries = region.entries(args, self._index)
        if self._sampler.armed:
            self._sample(region, args)
        self._sampler.enter_compiled(entries)

    def _sample(self, region: CompiledRegion, args: Sequence[Any]) -> None:
        layers = region.layers(args, self._index)
        if not region.obstacle and not _is_capturing():
            region.run(args, _Receiver(self._sampler, region, layers))
        present = {layer for layer in layers if layer is not None}
        self._seen |= present
        if region.obstacle:
            self._obstacles |= dict.fromkeys(present, region.obstacle)


class _Receiver:
    """Passes the values of one run of a graph on to the sampler, under their layers."""

    def __init__(
        self, sampler: Sampler, region: CompiledRegion, layers: Sequence[Layer | None]
    ) -> None:
        self._sampler = sampler
        self._calls = region.calls
        self._layers = layers

    def output(self, call: int, value: Tensor, entry: Tensor | None) -> None:
        layer = self._layers[call]
        if layer is not None:
            self._sampler.sample_compiled(layer, value, entry, self._calls[call].cuts)

    def activation(self, call: int, value: Tensor, bounds: tuple[float, float] | None) -> None:
        layer = self._layers[call]
        if layer is not None:
            self._sampler.sample_function(layer, value, bounds)


def _hooks_are_checked() -> bool:
    """Whether compiled code is used only while its modules have no hooks; not so by default."""
    return not sys.modules["torch._dynamo"].config.skip_nnmodule_hook_guards


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, which must hold nothing of ours."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()
