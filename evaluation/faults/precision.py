"""Mistakes in number formats."""

from __future__ import annotations

from neuraldbg.evaluation.faults.fault import Fault

PRECISION_FAULTS: tuple[Fault, ...] = ()
