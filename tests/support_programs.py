"""The ways people train: small programs, one for each row of the README's support table.

Each takes `watch`, a function that gives a context manager for the models, trains a few steps
inside it and returns what the training left behind.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 14


@dataclass
class Outcome:
    """What a program left: all its numbers, the losses of its steps, and its watcher."""

    tensors: list[Tensor]
    losses: list[float]
    watcher: object
    models: list[nn.Module] = field(default_factory=list)


PROGRAMS: dict[str, Callable] = {}


def program(row: str):
    """Enter a program under its row of the table."""

    def enter(function):
        assert row not in PROGRAMS
        PROGRAMS[row] = function
        return function

    return enter


def mlp(width: int = 16, outputs: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


def batch(step: int, rows: int = 12) -> Tensor:
    """The same inputs for the same step, from a generator of its own."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), x.sum(dim=1, keepdim=True))


def state_of(*owners) -> list[Tensor]:
    """Weights, buffers and optimizer states, copied."""
    found: list[Tensor] = []

    def collect(value):
        if isinstance(value, Tensor):
            found.append(value.detach().clone())
        elif isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, list | tuple):
            for part in value:
                collect(part)
        elif isinstance(value, int | float):
            found.append(torch.tensor(value))

    for owner in owners:
        collect(owner.state_dict())
    found.append(torch.get_rng_state())
    return found


def fit(model, optimizer, watch, loss_of=squared, steps=STEPS, set_to_none=True, before_step=None):
    losses = []
    with watch(model) as dbg:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, batch(step))
            loss.backward()
            if before_step is not None:
                before_step(model)
            optimizer.step()
            losses.append(loss.item())
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


def adam(model: nn.Module, **options):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, **options)


def sgd(model: nn.Module, **options):
    return torch.optim.SGD(model.parameters(), 1e-2, **options)


# Optimizers -------------------------------------------------------------------------------------


@program("plain loop, SGD with momentum")
def plain(watch):
    model = mlp()
    return fit(model, sgd(model, momentum=0.9), watch)


@program("`zero_grad(set_to_none=False)`")
def zeroed(watch):
    model = mlp()
    return fit(model, sgd(model), watch, set_to_none=False)


@program("`foreach` optimizers")
def foreach(watch):
    model = mlp()
    return fit(model, adam(model, foreach=True), watch)


@program("fused optimizers")
def fused(watch):
    model = mlp()
    return fit(model, adam(model, fused=True), watch)


@program("learning rate in a tensor (as capturable optimizers keep it)")
def tensor_rate(watch):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    return fit(model, optimizer, watch)


@program("LBFGS and other closures")
def lbfgs(watch):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            x = batch(step)

            def closure(x=x):
                optimizer.zero_grad()
                loss = squared(model, x)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


@program("gradient clipping")
def clipping(watch):
    model = mlp()
    return fit(
        model,
        sgd(model),
        watch,
        before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    )


@program("gradient accumulation")
def accumulation(watch):
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = [squared(model, part) / 3 for part in batch(step).chunk(3)]
            for part in parts:
                part.backward()
            optimizer.step()
            losses.append(sum(part.item() for part in parts) / 3)
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


@program("learning-rate schedules")
def schedules(watch):
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = squared(model, batch(step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


@program("no optimizer: weights changed by hand")
def by_hand(watch):
    model = mlp()
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            loss = squared(model, batch(step))
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
            losses.append(loss.item())
    return Outcome(state_of(model), losses, dbg, [model])


# Precision --------------------------------------------------------------------------------------


def autocast_program(dtype):
    def run(watch):
        model = mlp()

        def loss_of(model, x):
            with torch.autocast("cpu", dtype=dtype):
                return squared(model, x)

        return fit(model, adam(model), watch, loss_of)

    return run


program("autocast to bfloat16")(autocast_program(torch.bfloat16))
program("autocast to float16")(autocast_program(torch.float16))


def scaler_program(**options):
    def run(watch):
        model = mlp()
        optimizer = adam(model, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        losses = []
        with watch(model) as dbg:
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = squared(model, batch(step))
                scaler.scale(loss).backward()
                if not options:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
        return Outcome(state_of(model, optimizer), losses, dbg, [model])

    return run


program("`GradScaler`, with unscaling and clipping")(scaler_program())
program("`GradScaler` with a fused optimizer")(scaler_program(fused=True))


@program("weights in bfloat16")
def half_weights(watch):
    model = mlp().bfloat16()
    return fit(model, sgd(model), watch, lambda m, x: squared(m, x.bfloat16()))


# Memory -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(8, 16), mlp_body(), nn.Linear(16, 1)
        self.reentrant = reentrant

    def forward(self, x):
        hidden = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)
        return self.head(hidden)


def mlp_body() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16))


def checkpoint_program(reentrant):
    def run(watch):
        model = Checkpointed(reentrant)
        return fit(model, sgd(model), watch)

    return run


program("activation checkpointing, non-reentrant")(checkpoint_program(False))
program("activation checkpointing, reentrant")(checkpoint_program(True))


@program("saved tensors offloaded to the CPU")
def offloaded(watch):
    model = mlp()

    def loss_of(model, x):
        with torch.autograd.graph.save_on_cpu():
            return squared(model, x)

    return fit(model, sgd(model), watch, loss_of)


# Models -----------------------------------------------------------------------------------------


@program("several models and optimizers (GAN)")
def gan(watch):
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    steppers = [adam(critic), adam(generator)]
    losses = []
    with watch(generator, critic) as dbg:
        for step in range(STEPS):
            real, noise = batch(step), batch(1000 + step)[:, :4]
            steppers[0].zero_grad()
            scores = critic(real), critic(generator(noise).detach())
            loss = (
                nn.functional.softplus(-scores[0]).mean() + nn.functional.softplus(scores[1]).mean()
            )
            loss.backward()
            steppers[0].step()
            losses.append(loss.item())
            steppers[1].zero_grad()
            nn.functional.softplus(-critic(generator(noise))).mean().backward()
            steppers[1].step()
    return Outcome(state_of(generator, critic, *steppers), losses, dbg, [generator, critic])


class Tied(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, sparse=sparse)
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 20, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def next_token(model, x):
    tokens = (x.abs() * 7).long() % 20
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@program("tied weights")
def tied(watch):
    model = Tied()
    return fit(model, adam(model), watch, next_token)


@program("sparse embedding gradients")
def sparse(watch):
    model = Tied(sparse=True)
    return fit(model, sgd(model), watch, next_token)


@program("in-place activations")
def in_place(watch):
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(24, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 1),
    )  # fmt: skip
    return fit(model, sgd(model), watch, lambda m, x: squared(Unsqueezed(m), x))


class Unsqueezed:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x.unsqueeze(1))


@program("frozen layers")
def frozen(watch):
    model = mlp()
    model[0].requires_grad_(False)
    return fit(model, adam(model), watch)


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features) / math.sqrt(inner.in_features))
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, x):
        return self.inner(x) + x @ self.down.T @ self.up.T


@program("LoRA-style partial training")
def lora(watch):
    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 1)))
    return fit(model, adam(model), watch)


class Recurrent(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 1)
        self.packed = packed

    def forward(self, x):
        sequence = x.reshape(len(x), 4, 2)
        if self.packed:
            lengths = torch.arange(len(x)) % 4 + 1
            sequence = nn.utils.rnn.pack_padded_sequence(
                sequence, lengths, batch_first=True, enforce_sorted=False
            )
        _, (hidden, _) = self.lstm(sequence)
        return self.head(hidden[-1])


def recurrent_program(packed):
    def run(watch):
        model = Recurrent(packed)
        return fit(model, adam(model), watch)

    return run


program("recurrent layers")(recurrent_program(False))
program("packed sequences")(recurrent_program(True))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x.reshape(len(x) // 3, 3, 8)).reshape(len(x), 8))


@program("transformer layers and nested modules")
def attention(watch):
    model = Attention()
    return fit(model, adam(model), watch)


@program("quantisation-aware modules (fake quantisation)")
def quantised(watch):
    from torch.ao.quantization import FakeQuantize

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeQuantize()
            self.body = mlp()

        def forward(self, x):
            return self.body(self.fake(x))

    model = Quantised()
    return fit(model, sgd(model), watch)


# Autograd ---------------------------------------------------------------------------------------


@program("double backward (gradient penalty)")
def penalty(watch):
    model = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

    def loss_of(model, x):
        x = x.requires_grad_()
        score = model(x)
        [gradient] = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.square().mean() + (gradient.norm(dim=1) - 1).square().mean()

    return fit(model, sgd(model), watch, loss_of)


@program("`torch.func` inside the loop")
def functional(watch):
    model = mlp()

    def loss_of(model, x):
        weights = dict(model.named_parameters())

        def one(sample):
            out = torch.func.functional_call(model, weights, (sample.unsqueeze(0),))
            return (out.squeeze() - sample.sum()).square()

        return torch.vmap(one)(x).mean()

    return fit(model, sgd(model), watch, loss_of)


@program("`torch.autograd.backward` and `inputs=`")
def explicit(watch):
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = squared(model, batch(step))
            torch.autograd.backward(loss, inputs=list(model.parameters()))
            optimizer.step()
            losses.append(loss.item())
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


@program("validation between the steps")
def validated(watch):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    optimizer = adam(model)
    losses = []
    with watch(model) as dbg:
        for step in range(STEPS):
            model.train()
            optimizer.zero_grad()
            loss = squared(model, batch(step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    squared(model, batch(5000))
    return Outcome(state_of(model, optimizer), losses, dbg, [model])


class Wrapped(nn.Module):
    """`nn.Module.compile` does nothing for containers of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


def compiled_program(how):
    def run(watch):
        torch._dynamo.reset()
        model = Wrapped()
        if how == "method":
            model.compile(fullgraph=True, backend="aot_eager")
            called = model
        else:
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
        if how == "late":
            squared(called, batch(999)).backward()
            model.zero_grad()
        optimizer = sgd(model)
        outcome = fit(called, optimizer, watch)
        torch._dynamo.reset()
        return outcome

    return run


program("`torch.compile(model)`, fullgraph")(compiled_program("function"))
program("`model.compile()`, fullgraph")(compiled_program("method"))
program("`torch.compile`, attached after the first call")(compiled_program("late"))


def bare(*models):
    """Watch nothing."""
    return nullcontext()
