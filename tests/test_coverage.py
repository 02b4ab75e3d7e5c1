"""`dbg.coverage` names what was not observed, and why."""

import pandas as pd
import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.cut = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.act(self.body(self.frozen(x))) + self.cut(x).detach())


def train(model: nn.Module, steps: int, scalar: bool = True) -> NeuralDbg:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with NeuralDbg(model) as dbg:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square()
            if scalar:
                loss.mean().backward()
            else:
                loss.backward(torch.ones_like(loss))
            optimizer.step()
    assert dbg.faults == []
    return dbg


def row(table: pd.DataFrame, what: str, layer: str | None) -> pd.Series:
    chosen = table[
        (table["what"] == what)
        & (table["layer"].isna() if layer is None else table["layer"] == layer)
    ]
    assert len(chosen) == 1
    return chosen.iloc[0]


def test_what_was_observed_has_no_reason_and_what_was_not_has_one():
    table = train(Model(), 12).coverage
    for what, layer in [
        ("loss", None),
        ("output", "body"),
        ("gradient", "head"),
        ("update", "body"),
    ]:
        assert (row(table, what, layer)["observed"], row(table, what, layer)["of"]) == (12, 12)
        assert row(table, what, layer)["reason"] == ""
    assert row(table, "output", "spare")["reason"] == "never called in training"
    assert row(table, "gradient", "frozen")["reason"] == "requires no gradient"
    assert row(table, "gradient", "cut")["reason"] == "no gradient arrived"
    assert (table["observed"] <= table["of"]).all()


def test_a_run_without_steps_says_so():
    dbg = NeuralDbg(Model())
    with dbg:
        pass
    assert row(dbg.coverage, "loss", None)["reason"] == "no backward pass was seen"
    assert row(dbg.coverage, "output", "body")["reason"] == "never called in training"
    assert dbg.explain_failure().steps == 0


def test_a_loss_that_is_no_number_is_named():
    assert (
        "no single number" in row(train(Model(), 3, scalar=False).coverage, "loss", None)["reason"]
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_run_is_observed_and_explains_itself(steps):
    dbg = train(Model(), steps)
    assert row(dbg.coverage, "gradient", "head")["observed"] == steps
    assert len(dbg.explain_failure()) > 2


def test_a_crash_in_the_first_forward_pass_still_explains_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 1))
    dbg = NeuralDbg(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), dbg:
        model(torch.randn(2, 4))
    assert dbg.faults == []
    assert len(dbg.explain_failure()) > 2
    assert row(dbg.coverage, "output", "1")["reason"] == "never called in training"
