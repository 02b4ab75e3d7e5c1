"""How modules and parameters hang together with the loss: each fault beside what is ordinary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from neuraldbg import NeuralDbg

STEPS = 30
WIRING = {
    "parameters_frozen",
    "parameters_unregistered",
    "module_never_called",
    "evaluation_mode",
    "gradient_cut",
    "update_missing",
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    parameters: list[nn.Parameter] | None = None,
    steps: int = STEPS,
    watched: nn.Module | None = None,
) -> dict[str, list[str]]:
    """The layers of each event of wiring after training on a small regression."""
    generator = torch.Generator().manual_seed(1)
    held = list(model.parameters()) if parameters is None else parameters
    optimizer = torch.optim.Adam([p for p in held if p.requires_grad], lr=1e-2)
    loss_of = loss_of or (lambda x, y: mse_loss(model(x), y))
    with NeuralDbg(watched or model) as debugger:
        for _ in range(steps):
            x = torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            loss_of(x, x[:, :1] * x[:, 1:2]).backward()
            optimizer.step()
    return events_of(debugger)


def events_of(debugger: NeuralDbg) -> dict[str, list[str]]:
    assert debugger.faults == []
    found: dict[str, list[str]] = {}
    for event in debugger.events.itertuples():
        if event.event_type in WIRING:
            found.setdefault(str(event.event_type), []).append(str(event.layer))
    return found


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


# Frozen parameters ------------------------------------------------------------------------------


def test_frozen_random_layers_are_found() -> None:
    model = mlp(8, 32, 32, 1)
    freeze(model[0])
    freeze(model[2])
    assert train(model) == {"parameters_frozen": ["0", "2"]}


def test_a_frozen_random_layer_amid_trained_ones_is_found() -> None:
    model = mlp(8, 32, 32, 1)
    freeze(model[2])
    assert train(model) == {"parameters_frozen": ["2"]}


@pytest.mark.parametrize("init", [nn.init.kaiming_normal_, nn.init.xavier_uniform_])
def test_other_initialisations_are_known_to_be_random(init: Callable[[Tensor], Tensor]) -> None:
    model = mlp(8, 64, 64, 1)
    init(model[2].weight)
    nn.init.zeros_(model[2].bias)
    freeze(model[2])
    assert train(model) == {"parameters_frozen": ["2"]}


def test_a_pretrained_part_may_be_frozen() -> None:
    model = mlp(8, 32, 32, 1)
    train(model)
    freeze(model[0])
    freeze(model[2])
    model[4] = nn.Linear(32, 1)
    assert train(model) == {}


def test_low_rank_adapters_leave_the_trained_base_frozen() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = mlp(8, 32, 32, 1)
    train(model)
    freeze(model)
    for position in (0, 2, 4):
        model[position] = Adapted(model[position])
    assert train(model) == {}


def test_a_frozen_target_network_is_none_of_the_faults() -> None:
    model = nn.ModuleDict({"online": mlp(8, 32, 4), "target": mlp(8, 32, 4)})
    freeze(model["target"])

    def distance(x: Tensor, _: Tensor) -> Tensor:
        return mse_loss(model["online"](x), model["target"](x))

    assert train(model, distance) == {}


# Cut graphs -------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = mlp(8, 32, 16)
        self.head = mlp(16, 16, 1)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cut(self.encoder(x)))


@pytest.mark.parametrize(
    "cut",
    [
        Tensor.detach,
        lambda h: h.data,
        lambda h: torch.from_numpy(h.detach().numpy().copy()),
        lambda h: (h > 0).float(),
        lambda h: torch.relu(h.detach()),
    ],
    ids=["detach", "data", "numpy", "comparison", "detach and relu"],
)
def test_the_last_layer_before_a_cut_is_named(cut: Callable[[Tensor], Tensor]) -> None:
    assert train(TwoParts(cut)) == {"gradient_cut": ["encoder.2"]}


def test_a_choice_of_tokens_cuts_the_graph() -> None:
    class Discrete(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choice, self.table = mlp(8, 16, 20), nn.Embedding(20, 8)
            self.last = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table(self.choice(x).argmax(1)))

    assert train(Discrete()) == {"gradient_cut": ["choice.2"]}


def test_a_cut_after_attention_is_told_once() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 1)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.first(x[..., None])).detach().mean(1))

    assert train(Attending()) == {"gradient_cut": ["block.norm2"]}


def test_a_part_run_without_gradients_is_cut_off() -> None:
    class NoGrad(TwoParts):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = self.encoder(x)
            return self.head(hidden)

    assert train(NoGrad(Tensor.relu)) == {"gradient_cut": ["encoder.2"]}


class Residual(nn.Module):
    def __init__(self, cuts: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.branch, self.last = mlp(16, 32, 16), nn.Linear(16, 1)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branch = self.branch(x)
        return self.last(x + (branch.detach() if self.cuts else branch))


def test_a_residual_branch_that_is_cut_off_is_found() -> None:
    assert train(Residual(cuts=True)) == {"gradient_cut": ["branch.2"]}


def test_a_residual_branch_that_learns_is_no_cut() -> None:
    assert train(Residual(cuts=False)) == {}


def test_an_uncut_graph_has_no_cut() -> None:
    assert train(TwoParts(torch.relu)) == {}


def test_heads_of_other_tasks_are_not_cut_off() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp(8, 32)
            self.heads = nn.ModuleDict({"a": mlp(32, 32, 1), "b": mlp(32, 32, 1)})

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.trunk(x))
            return {name: head(hidden) for name, head in self.heads.items()}["b"]

    assert train(Heads()) == {}


def adversarial(detach: bool, generator_first: bool, critic_steps: int) -> dict[str, list[str]]:
    model = nn.ModuleDict({"G": mlp(4, 16, 2), "D": mlp(2, 16, 1)})
    of_generator = torch.optim.Adam(model["G"].parameters(), lr=2e-3)
    of_critic = torch.optim.Adam(model["D"].parameters(), lr=2e-3)

    def step_critic() -> None:
        fake = model["G"](torch.randn(16, 4)).detach()
        of_critic.zero_grad()
        (
            softplus(-model["D"](torch.randn(16, 2) + 2)) + softplus(model["D"](fake))
        ).mean().backward()
        of_critic.step()

    def step_generator() -> None:
        fake = model["G"](torch.randn(16, 4))
        of_generator.zero_grad()
        softplus(-model["D"](fake.detach() if detach else fake)).mean().backward()
        of_generator.step()

    with NeuralDbg(model) as debugger:
        for number in range(STEPS):
            if generator_first:
                step_generator()
            step_critic()
            if not generator_first and number % critic_steps == 0:
                step_generator()
    return events_of(debugger)


def test_a_generator_cut_off_from_its_critic_is_found() -> None:
    assert adversarial(True, False, 1) == {"gradient_cut": ["G.2"]}


@pytest.mark.parametrize(("generator_first", "critic_steps"), [(False, 1), (True, 1), (False, 5)])
def test_an_ordinary_adversarial_loop_has_no_cut(generator_first: bool, critic_steps: int) -> None:
    assert adversarial(False, generator_first, critic_steps) == {}


# Parameters outside the model and the optimizer ---------------------------------------------------


class InAList(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        blocks = [nn.Linear(32, 32), nn.Linear(32, 32)]
        self.blocks = nn.ModuleList(blocks) if registered else blocks
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)


def test_modules_in_a_plain_list_are_found_with_their_place() -> None:
    found = train(InAList(registered=False))
    names = [f"blocks.{number}.{part}" for number in (0, 1) for part in ("bias", "weight")]
    assert {kind: sorted(layers) for kind, layers in found.items()} == {
        "parameters_unregistered": names
    }


def test_modules_in_a_module_list_are_no_fault() -> None:
    assert train(InAList(registered=True)) == {}


def test_a_plain_list_is_no_fault_where_the_optimizer_holds_its_parameters() -> None:
    model = InAList(registered=False)
    held = [*model.parameters(), *(p for block in model.blocks for p in block.parameters())]
    assert train(model, parameters=held) == {}


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.body = mlp(8, 16, 1)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


@pytest.mark.parametrize(
    "scale",
    [nn.Parameter(torch.ones(1).double()).float(), torch.ones(1, requires_grad=True)],
    ids=["cast after wrapping", "never wrapped"],
)
def test_a_tensor_in_the_place_of_a_parameter_is_found(scale: Tensor) -> None:
    assert train(Scaled(scale)) == {"parameters_unregistered": ["scale"]}


def test_a_real_parameter_in_its_place_is_no_fault() -> None:
    assert train(Scaled(nn.Parameter(torch.ones(1)))) == {}


def test_parameters_made_in_forward_are_found() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) @ nn.Parameter(torch.randn(16, 1))

    assert train(Forgetful()) == {"parameters_unregistered": ["unregistered (16, 1)"]}


def test_inputs_that_ask_for_gradients_are_no_parameters() -> None:
    model = mlp(8, 16, 1)

    def smooth(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        model.last_input = x
        output = model(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        return mse_loss(output, y) + 0.1 * slope.square().mean()

    assert train(model, smooth) == {}


def test_networks_of_others_in_the_loss_are_no_faults() -> None:
    model, critic = mlp(8, 16, 4), mlp(4, 16, 1)
    assert train(model, lambda x, y: mse_loss(critic(model(x)), y)) == {}


def test_layers_the_optimizer_does_not_hold_are_found() -> None:
    model = mlp(8, 32, 32, 1)
    assert train(model, parameters=list(model[4].parameters()))["update_missing"] == ["2", "0"]


def test_a_new_head_alone_may_be_trained_on_a_pretrained_body() -> None:
    model = mlp(8, 32, 32, 1)
    train(model)
    model[4] = nn.Linear(32, 1)
    assert train(model, parameters=list(model[4].parameters())) == {}


# Modules never called -----------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.relu(self.norm(hidden) if self.calls else hidden))


def test_a_module_that_is_never_called_is_found() -> None:
    assert train(Normed(calls=False)) == {"module_never_called": ["norm"]}


def test_a_module_that_is_called_is_no_fault() -> None:
    assert train(Normed(calls=True)) == {}


def test_weights_used_without_a_call_are_no_fault() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.hidden = nn.Linear(16, 16)
            self.last = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)[:, None]
            h = self.attention(h, h, h)[0][:, 0]
            return self.last(nn.functional.linear(h, self.hidden.weight))

    assert train(Tied()) == {}


def test_experts_that_are_seldom_chosen_are_no_faults() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.experts = nn.ModuleList(mlp(16, 16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.experts[0](torch.relu(self.first(x))))

    assert train(Experts()) == {}


# Modes --------------------------------------------------------------------------------------------


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(32, 1))  # fmt: skip


def test_training_in_eval_mode_is_found() -> None:
    assert train(with_dropout().eval()) == {"evaluation_mode": ["1", "3"]}


def test_a_mode_never_switched_back_is_found_from_its_step_on() -> None:
    model = with_dropout()
    seen = 0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == 10:
            model.eval()
        return mse_loss(model(x), y)

    assert set(train(model, loss)) == {"evaluation_mode"}


def test_training_mode_with_evaluations_between_is_no_fault() -> None:
    model = with_dropout()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        return mse_loss(model(x), y)

    assert train(model, loss) == {}


def test_eval_mode_says_nothing_where_no_module_depends_on_it() -> None:
    assert train(mlp(8, 16, 1).eval()) == {}


def test_a_frozen_norm_of_a_pretrained_body_may_stay_in_eval_mode() -> None:
    model = with_dropout()
    train(model)
    freeze(model[0])
    freeze(model[1])
    model[1].eval()
    assert train(model) == {}


def test_a_moving_average_of_the_model_is_no_fault() -> None:
    online = mlp(8, 32, 1)
    model = nn.ModuleDict({"online": online, "average": copy.deepcopy(online)})
    freeze(model["average"])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, now in zip(model["average"].parameters(), online.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        return mse_loss(online(x), y) + 0.1 * mse_loss(online(x), model["average"](x))

    assert train(model, loss) == {}
