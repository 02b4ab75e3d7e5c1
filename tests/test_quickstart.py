"""The quick start of the README, on real data, as written there."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

from neuraldbg import FailureMode

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def dataloader() -> DataLoader:
    inputs, targets = load_diabetes(return_X_y=True)
    inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    targets = (targets - targets.mean()) / targets.std()
    data = TensorDataset(
        torch.tensor(inputs, dtype=torch.float32),
        torch.tensor(targets, dtype=torch.float32)[:, None],
    )
    torch.manual_seed(0)
    return DataLoader(data, batch_size=32, shuffle=True)


def quickstart() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if "with NeuralDbg(model) as dbg:" in block)


@pytest.mark.parametrize("epochs", [1, 10])
@pytest.mark.parametrize("functional", [False, True], ids=["module loss", "functional loss"])
@pytest.mark.parametrize(
    ("rate", "cause"), [("0.01", FailureMode.HEALTHY), ("5.0", FailureMode.LR_BLOWUP)]
)
def test_the_quick_start_says_what_is_wrong(
    dataloader: DataLoader, rate: str, cause: FailureMode, functional: bool, epochs: int
) -> None:
    code = quickstart().replace("lr=0.01", f"lr={rate}")
    if functional:
        code = code.replace("nn.MSELoss()(", "nn.functional.mse_loss(")
        assert "nn.functional.mse_loss" in code
    names = {"dataloader": [batch for _ in range(epochs) for batch in dataloader]}
    torch.manual_seed(1)
    exec(code, names)
    first = names["explanations"][0]
    assert first.cause is cause
    assert first.probability > 0.5
    assert names["dbg"].faults == []
