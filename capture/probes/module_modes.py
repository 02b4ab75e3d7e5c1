"""Modes of the modules that behave otherwise in training, as a backward pass finds them.

These are dropout (also inside recurrent and attention layers) and normalisations with running
statistics; a module that does the same in both modes says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.functional_dropout import functional_dropout
from neuraldbg.capture.layers import Layer, named_modules
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.series import Kind

_FIRST_STEPS = 16
"""Captured steps in all of which functional dropout is looked for, and then in every 16th."""
_NORM = nn.modules.batchnorm._NormBase
_DROPOUT = nn.modules.dropout._DropoutNd


def drop_probability(module: nn.Module) -> float:
    """The probability of a module's dropout, NaN where it has none.

    Example:
        >>> drop_probability(nn.Dropout(0.2)), drop_probability(nn.LSTM(2, 3, 2, dropout=0.1))
        (0.2, 0.1)
        >>> drop_probability(nn.Linear(1, 1))
        nan
    """
    if isinstance(module, _DROPOUT):
        return float(module.p)
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return math.nan  # dropout stands between the layers of a stack
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0:
        return float(module.dropout)
    return math.nan


def depends_on_mode(module: nn.Module) -> bool:
    """Whether a module does something else in training than in evaluation.

    >>> depends_on_mode(nn.BatchNorm1d(3)), depends_on_mode(nn.Dropout(0.0))
    (True, False)
    """
    if isinstance(module, _NORM):
        return module.running_mean is not None
    return drop_probability(module) > 0


@dataclass(frozen=True, slots=True)
class _Watched:
    layer: Layer
    module: nn.Module
    model: nn.Module
    follows: Layer | None


class ModuleModes(Probe):
    """Leaves `training`, `model_training` and `drop_probability` on rows of kind output."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._watched: list[_Watched] = []
        self._layers: Sequence[Layer] = ()
        self._modes: dict[_Watched, tuple[bool, bool]] = {}
        self._looks = 0
        self._functional: dict[Layer, float] = {}

    def detach(self) -> None:  # noqa: D102
        self._watched.clear()
        self._layers = ()
        self._modes.clear()
        self._functional.clear()

    def before_backward(self, roots: Sequence[Tensor]) -> None:  # noqa: D102
        if self._layers is not self.run.layers:
            self._layers = self.run.layers
            self._watched = list(_find(self.run.models, self.run.layers))
        if self._looks < _FIRST_STEPS or self._looks % _FIRST_STEPS == 0:
            self._look_for_functional(roots)
        self._looks += 1
        for watched in self._watched:
            training = self._modes.get(watched, (False, False))
            modes = (watched.module.training, watched.model.training)
            self._modes[watched] = (training[0] or modes[0], training[1] or modes[1])

    def _look_for_functional(self, roots: Sequence[Tensor]) -> None:
        """Find dropout that no module applies; that of modules has their probabilities."""
        if self.run.saved_tensors_are_packed:
            return
        of_modules = {round(drop_probability(w.module), 4) for w in self._watched}
        self._functional = {
            layer: probability
            for layer, probability in functional_dropout(roots, self.run.producers)
            if isinstance(layer, Layer) and probability not in of_modules
        }

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        modes, self._modes = self._modes, {}
        if self._functional:
            yield Deferred.of([self._functional_rows()])
        if modes:
            yield from self._rows(modes)

    def _functional_rows(self) -> Block:
        columns = {
            "training": np.ones(len(self._functional)),
            "drop_probability": np.array(list(self._functional.values())),
        }
        return Block(self.run.current_step(), Kind.OUTPUT, list(self._functional), columns)

    def _rows(self, modes: dict[_Watched, tuple[bool, bool]]) -> Iterable[Deferred]:
        for watched in modes:
            if watched.follows is not None:
                watched.layer.index = watched.follows.index
        columns = {
            "training": np.array([float(training) for training, _ in modes.values()]),
            "model_training": np.array([float(training) for _, training in modes.values()]),
            "drop_probability": np.array([drop_probability(w.module) for w in modes]),
        }
        layers = [watched.layer for watched in modes]
        yield Deferred.of([Block(self.run.current_step(), Kind.OUTPUT, layers, columns)])
        norms = [
            w for w, (training, _) in modes.items() if isinstance(w.module, _NORM) and not training
        ]
        if norms:
            yield _statistics_fresh(self.run.current_step(), norms)


def _statistics_fresh(step: int, norms: Sequence[_Watched]) -> Deferred:
    """Rows that tell whether running statistics are still zeros and ones."""
    found = [
        (w.layer, (w.module.running_mean == 0).all())
        for w in norms
        if isinstance(w.module.running_mean, Tensor)
    ]
    layers = [layer for layer, _ in found]
    return Deferred(
        lambda arrays: [
            Block(step, Kind.OUTPUT, layers, {"fresh": np.array([float(flag) for flag in arrays])})
        ],
        [flag for _, flag in found],
    )


def _find(models: Sequence[nn.Module], layers: Sequence[Layer]) -> Iterable[_Watched]:
    """The modules whose mode matters; those that are no layers get one, after the last before."""
    of_module = {layer.module: layer for layer in layers if layer.module is not None}
    prefixes = [type(model).__name__ if len(models) > 1 else "" for model in models]
    seen: set[nn.Module] = set()
    last: Layer | None = None
    for prefix, model in zip(prefixes, models, strict=True):
        for name, module in named_modules(model):
            if module in seen:
                continue
            seen.add(module)
            layer = of_module.get(module)
            last = layer or last
            if not depends_on_mode(module):
                continue
            if layer is not None:
                yield _Watched(layer, module, model, None)
            else:
                full = ".".join(filter(None, (prefix, name))) or type(module).__name__
                yield _Watched(Layer(full, None), module, model, last)
