"""Trains again and again in child processes that keep their runs on disk, and kills each of them.

Run as a program: python run_killing.py FOLDER KILLS. Leaves FOLDER/run-<n> and, in
FOLDER/told.json, for each run how many steps its process knew to be written when it was killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from neuraldbg import NeuralDbg
from neuraldbg.capture import run_writer

STEPS = 8


def train(folder: Path, tell) -> None:
    """Train a little network, written to disk after every step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with NeuralDbg(model, run=folder) as dbg:
        tell(0)
        for _ in range(STEPS):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            tell(dbg.steps)  # the step's end has written it


def start(folder: Path) -> tuple[int, int]:
    """Start a child that trains; gives its number and where to read what it tells."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            train(folder, lambda steps: os.write(writing, bytes([steps])))
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def main(folder: Path, kills: int) -> None:
    """Kill children at random moments of their lives."""
    torch.set_num_threads(1)
    run_writer.FIRST_INTERVAL = run_writer.LONGEST_INTERVAL = 0.0
    train(folder / "first", str)  # so that children find everything imported
    moments = random.Random(os.getpid())
    child, reading = start(folder / "whole")
    os.read(reading, 1)
    begin = time.perf_counter()
    os.waitpid(child, 0)
    lifetime = time.perf_counter() - begin
    told = []
    for number in range(kills):
        child, reading = start(folder / f"run-{number}")
        known = os.read(reading, 1)
        time.sleep(moments.uniform(0.0, lifetime))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 64):
            known = more
        os.close(reading)
        told.append(known[-1])
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
