"""Training loops of every shape are followed: steps, losses and micro-batches as they were."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuraldbg import NeuralDbg

F = nn.functional
STEPS = 12


def mlp(inputs=4, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def batch(size=16):
    x = torch.randn(size, 4)
    return x, x.sum(1, keepdim=True)


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_rows(dbg, optimizer=None):
    rows = dbg.series[dbg.series["kind"] == "loss"]
    chosen = rows["layer"].isna() if optimizer is None else rows["layer"] == optimizer
    return rows[chosen]


def optimizer_rows(dbg):
    return dbg.series[dbg.series["kind"] == "optimizer"]


def kept_share(dbg):
    kept = optimizer_rows(dbg)["gradient_kept"].dropna()
    assert len(kept)
    return kept.mean()


def assert_followed(dbg, losses, micro_batches=1, optimizer=None):
    """The series has exactly these steps, with exactly these losses."""
    assert dbg.faults == []
    rows = loss_rows(dbg, optimizer)
    assert rows["step"].tolist() == list(range(len(losses)))
    np.testing.assert_array_equal(rows["value"].to_numpy(), np.array(losses, np.float32))
    assert (rows["micro_batches"] == micro_batches).all()


def step_plainly(model, opt, losses, loss_of=F.mse_loss):
    x, y = batch()
    opt.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    opt.step()
    losses.append(loss.item())


RESETS = {
    "optimizer": lambda _, opt: opt.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
    "optimizer_zeros": lambda _, opt: opt.zero_grad(set_to_none=False),
    "model_zeros": lambda model, _: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("first", [True, False], ids=["before_forward", "after_step"])
@pytest.mark.parametrize("reset", RESETS)
def test_plain_loop(reset, first):
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            if first:
                RESETS[reset](model, opt)
            loss = nn.MSELoss()(model(x), y)
            loss.backward()
            opt.step()
            if not first:
                RESETS[reset](model, opt)
            losses.append(loss.item())
    assert_followed(dbg, losses)
    assert kept_share(dbg) == 0
    assert (optimizer_rows(dbg)["value"] == np.float32(0.01)).all()


def test_reset_between_forward_and_backward():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    assert kept_share(dbg) == 0


def test_gradients_never_reset_are_seen():
    model = mlp()
    opt, losses = sgd(model, lr=1e-4), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    assert kept_share(dbg) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(set_to_none):
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            opt.zero_grad(set_to_none=set_to_none)
            parts = []
            for _ in range(4):
                x, y = batch()
                loss = F.mse_loss(model(x), y) / 4
                loss.backward()
                parts.append(loss.item())
            opt.step()
            losses.append(sum(parts) / 4)
    assert_followed(dbg, losses, micro_batches=4)
    assert kept_share(dbg) == 0


@pytest.mark.parametrize(
    "loss_of",
    [F.mse_loss, F.l1_loss, F.smooth_l1_loss, lambda a, b: (a - b).pow(2).mean(), nn.HuberLoss()],
    ids=["mse", "l1", "smooth_l1", "written_out", "module"],
)
def test_any_loss(loss_of):
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            step_plainly(model, opt, losses, loss_of)
    assert_followed(dbg, losses)


def test_closure_with_sgd():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()

            def closure(x=x, y=y):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(opt.step(closure).item())
    assert_followed(dbg, losses)
    assert kept_share(dbg) == 0
    updates = dbg.series[dbg.series["kind"] == "update"]
    assert (updates["rms"] > 0).all()


def test_closure_with_lbfgs():
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    losses, calls = [], []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            parts = []

            def closure(x=x, y=y, parts=parts):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                parts.append(loss.item())
                return loss

            opt.step(closure)
            losses.append(sum(parts) / len(parts))
            calls.append(len(parts))
    assert_followed(dbg, losses, micro_batches=np.array(calls))
    assert kept_share(dbg) == 0


def test_no_optimizer_at_all():
    model = mlp()
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            model.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.data -= 0.01 * p.grad
            losses.append(loss.item())
        assert dbg.events is not None
    assert_followed(dbg, losses)
    updates = dbg.series[dbg.series["kind"] == "update"]
    assert sorted(set(updates["step"])) == list(range(STEPS))
    assert (updates["rms"] > 0).all()
    assert dbg.explain_failure().steps == STEPS


@pytest.mark.parametrize("as_tuple", [False, True])
def test_gan(as_tuple):
    generator, discriminator = mlp(3, 4), mlp(4, 1)
    g_opt, d_opt = sgd(generator), sgd(discriminator)
    g_losses, d_losses = [], []
    given = ((generator, discriminator),) if as_tuple else (generator, discriminator)
    bce = F.binary_cross_entropy_with_logits
    with NeuralDbg(*given) as dbg:
        for _ in range(STEPS):
            real, _ = batch()
            fake = generator(torch.randn(16, 3))
            d_opt.zero_grad()
            scores = discriminator(real), discriminator(fake.detach())
            d_loss = bce(scores[0], torch.ones(16, 1)) + bce(scores[1], torch.zeros(16, 1))
            d_loss.backward()
            d_opt.step()
            g_opt.zero_grad()
            g_loss = bce(discriminator(fake), torch.ones(16, 1))
            g_loss.backward()
            g_opt.step()
            d_losses.append(d_loss.item())
            g_losses.append(g_loss.item())
    assert_followed(dbg, d_losses)
    assert_followed(dbg, g_losses, optimizer="optimizer 1")
    assert set(dbg.series["layer"].dropna()) >= {
        "Sequential[0].0", "Sequential[0].2", "Sequential[1].0", "Sequential[1].2",
    }  # fmt: skip


def test_several_optimizers_on_one_model():
    model = mlp()
    opts = [sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=1e-3)]
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            for opt in opts:
                opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            for opt in opts:
                opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    rows = optimizer_rows(dbg)
    assert len(rows) == 2 * STEPS
    assert sorted(set(rows["step"])) == list(range(STEPS))
    assert set(rows["value"]) == {np.float32(0.01), np.float32(1e-3)}
    updates = dbg.series[dbg.series["kind"] == "update"]
    for name in ("0", "2"):
        assert (updates[updates["layer"] == name]["rms"] > 0).all()
    assert (dbg.series["in_optimizer"].dropna().groupby(dbg.series["step"]).last() == 1).all()


def test_validation_passes_do_not_count():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for step in range(STEPS):
            step_plainly(model, opt, losses)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(100 + 50 * torch.randn(16, 4))
            model.train()
            if step == 5:
                with torch.inference_mode():
                    model(torch.zeros(1, 4))
    assert_followed(dbg, losses)
    inputs = dbg.series[(dbg.series["kind"] == "input") & (dbg.series["target"] == 0)]
    inputs = inputs[inputs["evaluation"] != 1]
    assert len(inputs) == STEPS
    assert (inputs["rms"] < 2).all()


@pytest.mark.parametrize("order", ["before", "after", "from_the_start"])
def test_a_foreign_model_does_not_disturb(order):
    model, foreign = mlp(), mlp()
    opt, foreign_opt = sgd(model), sgd(foreign)
    losses = []
    with NeuralDbg(model) as dbg:
        if order == "from_the_start":
            for _ in range(5):
                step_plainly(foreign, foreign_opt, [])
        for _ in range(STEPS):
            if order == "before":
                step_plainly(foreign, foreign_opt, [])
            step_plainly(model, opt, losses)
            if order == "after":
                step_plainly(foreign, foreign_opt, [])
    assert_followed(dbg, losses)
    assert len(optimizer_rows(dbg)) == STEPS


def test_a_foreign_model_trained_between_forward_and_backward():
    model, foreign = mlp(), mlp()
    opt, foreign_opt = sgd(model), sgd(foreign)
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            step_plainly(foreign, foreign_opt, [])
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    assert len(optimizer_rows(dbg)) == STEPS


def test_accumulation_from_the_start_beside_a_foreign_model():
    model, foreign = mlp(), mlp()
    opt, foreign_opt = sgd(model), sgd(foreign)
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            step_plainly(foreign, foreign_opt, [])
            opt.zero_grad()
            parts = []
            for _ in range(2):
                x, y = batch()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                parts.append(loss.item())
            opt.step()
            losses.append(sum(parts) / 2)
    assert_followed(dbg, losses, micro_batches=2)


def test_autograd_backward():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            torch.autograd.backward(loss)
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)


def test_autocast():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    outputs = dbg.series[dbg.series["kind"] == "output"]
    assert np.isfinite(outputs["rms"]).all()


def test_a_model_in_half_precision():
    model = mlp().bfloat16()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            opt.zero_grad()
            loss = F.mse_loss(model(x.bfloat16()), y.bfloat16())
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)


class Checkpointed(nn.Module):
    def __init__(self, reentrant) -> None:
        super().__init__()
        self.entry, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(8, 1), reentrant
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def block(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))))

    def forward(self, x):
        return self.head(checkpoint(self.block, self.entry(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model = Checkpointed(reentrant)
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            step_plainly(model, opt, losses)
    assert_followed(dbg, losses)
    outputs = dbg.series[dbg.series["kind"] == "output"]
    # Reentrant checkpointing runs its blocks without a graph: nothing of them is sampled.
    inside = set() if reentrant else {"first", "second"}
    assert set(outputs["layer"]) == {"entry", "head"} | inside
    assert len(outputs) == (2 + len(inside)) * STEPS
    gradients = dbg.series[dbg.series["kind"] == "gradient"]
    assert (gradients["norm"] > 0).all()
    assert len(gradients) == 4 * STEPS


def test_frozen_layers():
    model = mlp()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            step_plainly(model, opt, losses)
    assert_followed(dbg, losses)
    weights = dbg.series[dbg.series["kind"] == "parameter"].set_index("layer")["trainable"]
    assert (weights["0"] == 0).all()
    assert (weights["2"] == 1).all()
    gradients = dbg.series[dbg.series["kind"] == "gradient"].set_index("layer")["norm"]
    assert gradients["0"].isna().all()
    assert (gradients["2"] > 0).all()


class Tied(nn.Module):
    def __init__(self, sparse=False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, sparse=sparse)
        self.hidden = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 10)
        if not sparse:
            self.decode.weight = self.embed.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.hidden(self.embed(x))))


@pytest.mark.parametrize("sparse", [False, True], ids=["tied", "sparse"])
def test_weight_tying_and_sparse_gradients(sparse):
    model = Tied(sparse)
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x = torch.randint(10, (16,))
            opt.zero_grad()
            loss = F.cross_entropy(model(x), x)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    gradients = dbg.series[dbg.series["kind"] == "gradient"].set_index("layer")["norm"]
    for name in ("embed", "hidden", "decode"):
        assert (gradients[name] > 0).all()
    assert (loss_rows(dbg)["expected"] - np.log(10) < 1e-6).all()


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    losses = []
    opt = None
    with NeuralDbg(model) as dbg:
        for _ in range(STEPS):
            x, y = batch()
            out = model(x)
            opt = opt or sgd(model)
            opt.zero_grad()
            loss = F.mse_loss(out, y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert_followed(dbg, losses)
    outputs = dbg.series[dbg.series["kind"] == "output"]
    assert {"0", "1", "2"} <= set(outputs["layer"])
    assert {"0", "2"} == set(dbg.series[dbg.series["kind"] == "parameter"]["layer"])


@pytest.mark.parametrize("watched", ["inner", "compiled"])
def test_a_compiled_model_does_not_crash(watched):
    torch.compiler.reset()
    inner = mlp()
    model = torch.compile(inner, backend="eager")
    opt, losses = sgd(model), []
    with NeuralDbg(inner if watched == "inner" else model) as dbg:
        for _ in range(STEPS):
            step_plainly(model, opt, losses)
    torch.compiler.reset()
    assert_followed(dbg, losses)
    assert len(dbg.explain_failure())


def test_a_loop_that_raises_still_explains():
    model = mlp()
    opt, losses = sgd(model), []
    dbg = NeuralDbg(model)

    def loop():
        with dbg:
            for step in range(STEPS):
                step_plainly(model, opt, losses)
                if step == 7:
                    model(batch()[0])  # a pass left unfinished
                    raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        loop()
    assert len(losses) == 8
    assert_followed(dbg, losses)
    assert dbg.explain_failure().steps == 8


def test_an_error_inside_the_forward_pass_passes_through():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for step in range(STEPS):
            step_plainly(model, opt, losses)
            if step == 3:
                with pytest.raises(RuntimeError, match="shapes"):
                    model(torch.zeros(2, 3))
    assert_followed(dbg, losses)


def test_an_error_inside_the_backward_pass_passes_through():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(4):
            step_plainly(model, opt, losses)
        loss = F.mse_loss(model(batch()[0]), batch()[1])
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_followed(dbg, losses)


@pytest.mark.parametrize("optimizer", ["same", "new", "none"])
def test_entered_again(optimizer):
    model = mlp()
    opt, losses = sgd(model), []
    dbg = NeuralDbg(model)
    for _ in range(2):
        with dbg:
            for _ in range(STEPS):
                if optimizer != "none":
                    step_plainly(model, opt, losses)
                    continue
                x, y = batch()
                model.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.item())
        step_plainly(model, opt, [])  # what happens in between is not seen
        if optimizer == "new":
            opt = sgd(model)
    assert_followed(dbg, losses)


def test_an_optimizer_replaced_midway():
    model = mlp()
    opts, losses = [sgd(model), sgd(model), sgd(model)], []
    with NeuralDbg(model) as dbg:
        for opt in opts:
            for _ in range(STEPS):
                step_plainly(model, opt, losses)
    assert dbg.faults == []
    rows = dbg.series[dbg.series["kind"] == "loss"]
    assert rows["step"].tolist() == list(range(3 * STEPS))


def test_watching_the_same_model_twice_at_once():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as outer:
        for _ in range(3):
            step_plainly(model, opt, losses)
        with NeuralDbg(model) as inner:
            for _ in range(3):
                step_plainly(model, opt, losses)
        for _ in range(3):
            step_plainly(model, opt, losses)
    assert_followed(outer, losses)
    assert_followed(inner, losses[3:6])


def test_nested_on_two_models():
    first, second = mlp(), mlp()
    opts = sgd(first), sgd(second)
    losses = [], []
    with NeuralDbg(first) as outer, NeuralDbg(second) as inner:
        for _ in range(STEPS):
            step_plainly(first, opts[0], losses[0])
            step_plainly(second, opts[1], losses[1])
    assert_followed(outer, losses[0])
    assert_followed(inner, losses[1])


def test_a_loop_without_steps():
    with NeuralDbg(mlp()) as dbg:
        pass
    assert dbg.faults == []
    assert len(dbg.series) == 0
    assert len(dbg.events) == 0
    assert len(dbg.explain_failure())


def test_only_forward_passes():
    model = mlp()
    with NeuralDbg(model) as dbg:
        for _ in range(5):
            model(batch()[0])
    assert dbg.faults == []
    assert len(loss_rows(dbg)) == 0


def test_long_loops_are_sampled_and_every_loss_is_kept():
    model = mlp()
    opt, losses = sgd(model), []
    with NeuralDbg(model) as dbg:
        for _ in range(150):
            step_plainly(model, opt, losses)
    assert_followed(dbg, losses)
    captured = sorted(set(dbg.series[dbg.series["kind"] == "output"]["step"]))
    schedule = dbg._recorder.schedule
    assert captured == [step for step in range(150) if schedule.captures(step)]
    assert kept_share(dbg) == 0
