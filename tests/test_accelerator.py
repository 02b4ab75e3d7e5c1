"""Nothing that runs inside the loop makes an accelerator wait.

The meta device stands in for one: it runs every operation and holds no values, so that any read
of a value (item, float, bool, tolist, cpu) raises.
"""

import contextlib

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule, probe, transfer


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return torch.sigmoid(self.head(self.lstm(self.embed(x))[0][:, -1])).squeeze(1)


def convolutional_loss(model):
    inputs, labels = torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
    return nn.functional.cross_entropy(model(inputs), labels)


def recurrent_loss(model):
    inputs, targets = torch.randint(20, (16, 5)), torch.rand(16)
    return nn.functional.mse_loss(model(inputs), targets)


PROGRAMS = {
    "convolutional": (Convolutional, convolutional_loss),
    "recurrent": (Recurrent, recurrent_loss),
}


def train(program, steps, optimizer=torch.optim.SGD, device=None, clip=False, evaluate=False):
    """Train; returns the watcher, and its faults as they were when the last step had ended."""
    make, loss_of = PROGRAMS[program]
    with torch.device(device) if device else contextlib.nullcontext():
        torch.manual_seed(0)
        model = make()
        stepper = optimizer(model.parameters(), lr=0.01)
        with NeuralDbg(model, schedule=Schedule(dense_steps=6, periods=((6, 5),))) as dbg:
            for step in range(steps):
                stepper.zero_grad(set_to_none=step % 2 == 0)
                loss_of(model).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                stepper.step()
                if evaluate and step % 5 == 0:
                    model.eval()
                    with torch.no_grad():
                        loss_of(model)
                    model.train()
            faults = dbg.faults
    return dbg, faults


@pytest.fixture
def departures(monkeypatch):
    """Copies to the host that were begun, as (step, number of values); the values are ones."""
    found = []

    def depart(step, rows, tensors):
        assert {tensor.device.type for tensor in tensors} <= {"meta"}
        size = sum(tensor.numel() for tensor in tensors)
        found.append((step, size))
        return transfer._Journey(step, rows, torch.ones(size, device="cpu"))

    def arrive(tensor):  # what is still under way when the run has ended
        return np.ones(tensor.shape, dtype=np.float32)

    monkeypatch.setattr(transfer, "_depart", depart)
    monkeypatch.setattr(probe, "_to_array", arrive)
    return found


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("evaluate", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_value_is_read_inside_the_loop(program, optimizer, clip, evaluate, departures):
    _, faults = train(program, 20, optimizer, "meta", clip, evaluate)
    assert faults == []
    steps = [step for step, _ in departures]
    assert steps == [0, 1, 2, 3, 4, 5, 10, 15], "one copy for each captured step"


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_made_later_are_those_made_at_once(program, monkeypatch):
    plain, _ = train(program, 30)
    original = transfer.Transfers.__init__

    def deferring(self, deliver, always_defer=True):
        original(self, deliver, always_defer)

    monkeypatch.setattr(transfer.Transfers, "__init__", deferring)
    deferred, _ = train(program, 30)
    assert deferred.faults == plain.faults == []
    pd.testing.assert_frame_equal(deferred.series, plain.series, rtol=1e-5)
    pd.testing.assert_frame_equal(deferred.events, plain.events, rtol=1e-4)


def test_deferred_rows_arrive_in_the_order_of_their_steps():
    from neuraldbg.capture.probe import Deferred

    arrived = []
    transfers = transfer.Transfers(lambda blocks, step: arrived.append((step, blocks)), True)
    for step in range(4):
        deferred = Deferred(lambda arrays: [a.copy() for a in arrays], [torch.full((2,), step)])
        transfers.send(step, [deferred, deferred])
    transfers.settle()
    assert [step for step, _ in arrived] == [0, 1, 2, 3]
    for step, blocks in arrived:
        np.testing.assert_array_equal(blocks, np.full((2, 2), step))
