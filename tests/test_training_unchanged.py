"""Training is bit for bit the same with and without NeuralDBG."""

import contextlib

import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg

F = nn.functional
STEPS = 30


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(F.dropout(torch.tanh(out[:, -1]), 0.1, self.training))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


def mlp():
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(128, 3),
    )  # fmt: skip


ARCHITECTURES = {
    "mlp": (mlp, lambda: torch.randn(16, 8)),
    "cnn": (cnn, lambda: torch.randn(8, 1, 14, 14)),
    "transformer": (Transformer, lambda: torch.randint(20, (8, 6))),
    "lstm": (Recurrent, lambda: torch.randn(8, 5, 6)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


def train(architecture, optimizer, watch=None, at_step=lambda *_: None):
    build, batch = ARCHITECTURES[architecture]
    torch.manual_seed(7)
    model = build()
    opt = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    with watch(model) if watch else contextlib.nullcontext() as dbg:
        for step in range(STEPS):
            inputs = batch()
            targets = torch.randint(3, (len(inputs),))
            opt.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            opt.step()
            losses.append(loss.item())
            at_step(step, dbg)
    if dbg is not None:
        assert dbg.faults == []
    return model.state_dict(), opt.state_dict(), torch.get_rng_state(), losses


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    else:
        assert first == second


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_buffers_optimizer_and_random_state_are_the_same(architecture, optimizer):
    assert_same(train(architecture, optimizer), train(architecture, optimizer, NeuralDbg))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_explaining_midway_changes_nothing(architecture):
    seen = []

    def explain(step, dbg):
        if dbg is not None and step in (2, 17):
            seen.append(dbg.explain_failure()[0])

    watched = train(architecture, "sgd", NeuralDbg, explain)
    assert len(seen) == 2
    assert_same(train(architecture, "sgd"), watched)


def test_the_comparison_notices_a_single_bit():
    first, second = torch.ones(3), torch.ones(3)
    second[0] = torch.nextafter(second[0], torch.tensor(2.0))
    with pytest.raises(AssertionError):
        assert_same({"a": [first]}, {"a": [second]})
