"""Mistakes in dropout, normalisation and the amount of data."""

from __future__ import annotations

from neuraldbg.evaluation.faults.fault import Fault

REGULARISATION_FAULTS: tuple[Fault, ...] = ()
