"""Probes: each gathers one kind of evidence along the steps of a run.

A new one is a file here, a subclass of `Probe`, and an entry in `PROBES`.
"""

from neuraldbg.capture.probe import Probe

PROBES: tuple[type[Probe], ...] = ()

__all__ = ["PROBES"]
