"""Histograms of labels: their entropy, and the entropy that a random batch should have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

MAX_CLASSES = 4_096
"""Classes told apart; higher labels count as one more."""
_EXACT = 20_000
"""Classes times batch size up to which the expected entropy is summed exactly."""


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution that some counts show.

    >>> round(entropy(np.array([2, 2, 0])), 4)
    0.6931
    """
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def random_batch_entropy(counts: np.ndarray, size: int) -> float:
    """Expected entropy in nats of the labels of a batch drawn at random.

    A small batch shows fewer classes than there are. The count of each class is binomial, so that
    the expectation is a sum over classes and counts; for large batches its first two terms in the
    inverse of the size serve (Miller, Note on the bias of information estimates, 1955).

    Args:
        counts: Of each class, over the run.
        size: Labels in a batch.

    Example:
        >>> round(random_batch_entropy(np.array([50, 50]), 1), 4)
        0.0
        >>> round(random_batch_entropy(np.array([50, 50]), 2), 4)  # half of the pairs are mixed
        0.3466
        >>> round(random_batch_entropy(np.array([50, 50]), 100_000), 4)
        0.6931
    """
    shares = counts[counts > 0] / max(counts.sum(), 1)
    if len(shares) <= 1 or size <= 1:
        return 0.0
    if len(shares) * size > _EXACT:
        return max(entropy(counts) - (len(shares) - 1) / (2 * size), 0.0)
    k = np.arange(1, size)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])
    log_choices = log_factorials[size] - log_factorials[k] - log_factorials[size - k]
    log_weights = log_choices + np.outer(np.log(shares), k) + np.outer(np.log1p(-shares), size - k)
    terms = -(k / size) * np.log(k / size)
    return float((np.exp(log_weights) * terms).sum())


@dataclass(slots=True)
class LabelHistogram:
    """Counts of the labels seen so far.

    Example:
        >>> seen = LabelHistogram()
        >>> seen.add(np.array([0, 2, 2, 2])).tolist(), seen.counts[:3].tolist()
        ([1, 0, 3], [1.0, 0.0, 3.0])
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, labels: np.ndarray) -> np.ndarray:
        """Count a batch's labels, whole numbers from 0; returns the batch's own counts."""
        batch = np.bincount(np.minimum(labels.astype(np.int64), MAX_CLASSES))
        if len(batch) > len(self.counts):
            self.counts = np.pad(self.counts, (0, len(batch) - len(self.counts)))
        self.counts[: len(batch)] += batch
        return batch

    def majority(self, weights: np.ndarray | None = None) -> tuple[int, float]:
        """The class that weighs most, and its share of the weight of all labels.

        Args:
            weights: Of the classes in the loss; equal if left out.
        """
        counts = self.counts
        if weights is not None and len(weights) >= len(counts):
            counts = counts * weights[: len(counts)]
        total = counts.sum()
        if not len(counts) or not total > 0:
            return 0, math.nan
        largest = int(np.argmax(counts))
        return largest, float(counts[largest] / total)
