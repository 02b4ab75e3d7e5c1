"""Which labels a run sees: of each batch and over the run, and whether the outputs follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.label_histogram import LabelHistogram, entropy, random_batch_entropy
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.loss_head import LossTerm, read_loss_terms
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.sampling import MAX_UNITS, SAMPLE_SIZE, strided_sample
from neuraldbg.series import Kind

_CONSTANT_BATCH = 8
"""Labels from which on a batch of a single binary label is no accident."""
_SWITCH_WITHIN = 4
"""Steps within which binary labels that go from all 0 to all 1 and back are made up, as those of
a GAN are: sorted data go there and back once an epoch."""


class Labels(Probe):
    """Columns of the loss's row about labels, of losses of classes and binary ones.

    Single labels that make up one sample (of pixels, of tokens in a text) are counted, but not
    compared with a random batch: neighbours are alike in the best-shuffled data.
    """

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._seen = LabelHistogram()
        self._passes: list[Deferred] = []
        self._entered: tuple[int, ...] = ()
        self._made_up = False
        self._constant: tuple[int, float] | None = None
        self._switched: int | None = None

    def detach(self) -> None:
        """Let go of samples not handed out."""
        self._passes.clear()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: ARG002
        """Note how many samples enter the model: one of the first two sizes."""
        if not self._entered and args and isinstance(args[0], Tensor):
            self._entered = tuple(args[0].shape[:2])

    def after_backward(self) -> None:
        """The next pass has a batch of its own."""
        self._entered = ()

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Take a sample of the labels and of the outputs."""
        if not roots or roots[0].grad_fn is None or self.run.saved_tensors_are_packed:
            return
        try:
            terms = [t for t in read_loss_terms(roots[0]) if t.kind in ("classes", "binary")]
        except RuntimeError:  # a graph already freed
            return
        for term in terms[:2]:
            if term.target is not None and term.target.numel():
                self._passes.append(self._row(term, alone=len(terms) == 1))

    def frame(self) -> Iterable[Deferred]:
        """The rows of this step."""
        passes, self._passes = self._passes, []
        return passes

    def _row(self, term: LossTerm, alone: bool) -> Deferred:
        assert term.target is not None
        labels = _labels(term)
        size = labels.numel()
        whole = size in self._entered and size <= SAMPLE_SIZE
        tensors = [strided_sample(labels, max(labels.dim() - 1, 0)).float().clone()]
        predicted = _predicted(term) if alone else None
        if predicted is not None:
            tensors.append(predicted)
        if term.weight is not None:
            tensors.append(term.weight.detach().float().clone())
        step = self.run.current_step()
        layout = (term.kind, term.classes, term.ignored, predicted is not None, whole)

        def make(values: list[np.ndarray]) -> list[Block]:
            return self._make(step, layout, values)

        return Deferred(make, tensors)

    def _make(
        self,
        step: int,
        layout: tuple[str, int, int | None, bool, bool],
        values: list[np.ndarray],
    ) -> list[Block]:
        kind, classes, ignored, has_predicted, whole = layout
        rest = values[1:]
        predicted = rest.pop(0).ravel() if has_predicted else None
        weight = rest[0].ravel() if rest else None
        labels = values[0].ravel()
        known = np.isfinite(labels) & (labels >= 0)
        if ignored is not None:
            known &= labels != ignored
        labels = labels[known]
        if kind == "binary":
            self._note_made_up(step, labels)
            labels = labels >= 0.5
            if weight is not None:
                weight = np.array([1.0, float(weight.mean())])
        if not len(labels) or self._made_up:
            return []
        counts = self._seen.add(labels)
        majority, share = self._seen.majority(weight)
        columns = {
            "classes": np.array([float(classes)]),
            "label_majority": np.array([share]),
        }
        if predicted is not None and len(predicted):
            columns["predicted_majority"] = np.array([float((predicted == majority).mean())])
        if whole and classes <= MAX_UNITS:
            random = random_batch_entropy(self._seen.counts, len(labels))
            columns["label_entropy"] = np.array([entropy(counts)])
            columns["random_label_entropy"] = np.array([random])
        return [Block(0, Kind.LOSS, [None], columns)]

    def _note_made_up(self, step: int, labels: np.ndarray) -> None:
        """Recognise binary labels that tell real from generated samples."""
        if len(labels) < _CONSTANT_BATCH or np.ptp(labels) > 0:
            return
        if self._constant is not None:
            seen, label = self._constant
            if label != labels[0] and step - seen <= _SWITCH_WITHIN:
                self._made_up |= (
                    self._switched is not None and step - self._switched <= _SWITCH_WITHIN
                )
                self._switched = step
        self._constant = (step, float(labels[0]))


def _labels(term: LossTerm) -> Tensor:
    """Class labels; of soft labels the largest."""
    assert term.target is not None
    target = term.target.detach()
    if term.kind == "classes" and target.is_floating_point() and term.class_axis is not None:
        return target.argmax(term.class_axis)
    return target


def _predicted(term: LossTerm) -> Tensor | None:
    """A sample of the predicted classes, None where there are too many to sample."""
    prediction: Any = term.prediction
    if prediction is None or not prediction.dim():
        return None
    scores = prediction.detach()
    if term.kind == "classes":
        if term.class_axis is None or not 1 < term.classes <= MAX_UNITS:
            return None
        sample = strided_sample(scores, term.class_axis)
        return sample.argmax(-1).float()
    threshold = 0.0 if "Logits" in term.node.name() else 0.5
    return (strided_sample(scores, scores.dim() - 1) > threshold).float()
