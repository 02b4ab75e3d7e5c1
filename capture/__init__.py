"""The torch spoke: watches a training run and turns it into a series and an event table."""

if __name__ == "capture":
    raise ImportError(
        "this folder is the package neuraldbg.capture: import neuraldbg.capture, not capture"
    )

from neuraldbg.capture.budget import Budget
from neuraldbg.capture.cost import Cost
from neuraldbg.capture.event_detection import detect_events
from neuraldbg.capture.guard import CaptureFaultWarning
from neuraldbg.capture.recorder import Recorder
from neuraldbg.capture.schedule import Schedule

__all__ = ["Budget", "CaptureFaultWarning", "Cost", "Recorder", "Schedule", "detect_events"]
