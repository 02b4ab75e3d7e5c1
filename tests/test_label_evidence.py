"""Labels and targets: imbalance, order and scale are seen, and ordinary runs give no such event."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg
from neuraldbg.capture.label_histogram import entropy, random_batch_entropy

F = nn.functional
MINE = {
    "target_off_scale", "labels_imbalanced", "batches_ordered", "output_out_of_domain",
    "reduction_over_wrong_axis", "shapes_broadcast", "operation_undefined",
    "input_non_finite", "target_non_finite", "loss_non_finite", "gradient_non_finite",
}  # fmt: skip


def events_of(model, batches, loss_of, lr=0.05, optimizer=torch.optim.SGD):
    stepper = optimizer(model.parameters(), lr=lr)
    with NeuralDbg(model) as dbg:
        for x, y in batches:
            stepper.zero_grad()
            loss_of(model(x), y).backward()
            stepper.step()
    assert dbg.faults == []
    return dbg.events[dbg.events["event_type"].isin(MINE)].set_index("event_type")


def samples(count, classes=4, shares=None):
    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor(shares or [1.0] * classes)
    y = torch.multinomial(weights, count, replacement=True, generator=generator)
    centres = 2 * torch.eye(8)[:classes]
    return centres[y] + torch.randn(count, 8, generator=generator), y


def epochs(x, y, order, size=16, count=4):
    return [(x[i], y[i]) for _ in range(count) for i in order.split(size)]


def shuffled(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(2))


def classifier(classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_entropy_of_a_random_batch_agrees_with_all_batches_counted_out(size):
    counts = np.array([5, 3, 0, 2])
    shares = counts / counts.sum()
    expected = sum(
        math.prod(shares[list(batch)]) * entropy(np.bincount(batch, minlength=4))
        for batch in itertools.product(range(4), repeat=size)
    )
    assert random_batch_entropy(counts, size) == pytest.approx(expected, abs=1e-12)


def test_the_entropy_of_a_large_random_batch_agrees_with_draws():
    counts = np.arange(1, 60)
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(600, counts / counts.sum(), size=200)
    mean = np.mean([entropy(batch) for batch in drawn])
    assert random_batch_entropy(counts, 600) == pytest.approx(mean, abs=0.01)


@pytest.mark.parametrize(
    "loss_of",
    [F.cross_entropy, lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean()],
    ids=["cross_entropy", "written"],
)
def test_sorted_classes_are_told_from_shuffled_ones(loss_of):
    x, y = samples(320)
    found = events_of(classifier(), epochs(x, y, y.argsort()), loss_of)
    assert list(found.index) == ["batches_ordered"]
    assert found["value"].iloc[0] < 0.5
    assert events_of(classifier(), epochs(x, y, shuffled(320)), loss_of).empty


def test_sorted_binary_labels_are_told_from_shuffled_ones():
    x, y = samples(320, classes=2)
    target = y.float()[:, None]
    loss_of = F.binary_cross_entropy_with_logits
    found = events_of(classifier(1), epochs(x, target, y.argsort()), loss_of)
    assert list(found.index) == ["batches_ordered"]
    assert events_of(classifier(1), epochs(x, target, shuffled(320)), loss_of).empty


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiny_batches_in_random_order_are_not_ordered(size):
    x, y = samples(300, classes=3)
    batches = epochs(x, y, shuffled(300), size, count=1)
    assert events_of(classifier(3), batches, F.cross_entropy, lr=0.01).empty


def regression(count=320):
    x, _ = samples(count)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + x[:, 2:3] * x[:, 3:4]


def test_sorted_values_are_told_from_shuffled_ones():
    x, y = regression()
    order = y[:, 0].argsort()
    model = classifier(1)
    found = events_of(model, epochs(x, y, order), F.mse_loss, lr=0.01)
    assert list(found.index) == ["batches_ordered"]
    assert events_of(classifier(1), epochs(x, y, shuffled(320)), F.mse_loss, lr=0.01).empty


def test_targets_that_drift_once_are_the_course_of_the_run():
    x, y = regression(640)
    drifting = epochs(x, y + torch.linspace(0, 20, 640)[:, None], torch.arange(640), count=1)
    assert "batches_ordered" not in events_of(classifier(1), drifting, F.mse_loss, lr=1e-3).index


def rare(seed, weight=None, gap=0.8):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(120):
        y = (torch.rand(64, generator=generator) < 0.06).long()
        x = torch.randn(64, 8, generator=generator)
        x[:, 0] += gap * y
        batches.append((x, y))
    return events_of(classifier(2), batches, nn.CrossEntropyLoss(weight=weight))


def test_a_class_that_swallows_the_predictions():
    found = rare(1)
    assert list(found.index) == ["labels_imbalanced"]
    assert found["value"].iloc[0] == pytest.approx(0.94, abs=0.02)


def test_a_rare_class_that_is_weighted_or_learned_is_no_event():
    assert rare(1, weight=torch.tensor([1 / 0.94, 1 / 0.06]) / 2).empty
    assert rare(1, gap=8.0).empty


@pytest.mark.parametrize(
    "loss_of", [F.mse_loss, lambda out, y: ((out - y) ** 2).mean()], ids=["mse_loss", "written"]
)
def test_targets_in_the_hundred_thousands(loss_of):
    x, y = regression()
    found = events_of(classifier(1), epochs(x, 2e5 + 5e4 * y, shuffled(320)), loss_of, lr=1e-9)
    assert list(found.index) == ["target_off_scale"]
    assert found["value"].iloc[0] > 1e4
    assert events_of(classifier(1), epochs(x, y, shuffled(320)), loss_of, lr=0.01).empty


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh, nn.ReLU])
def test_targets_that_the_output_cannot_reach(activation):
    x, y = regression()
    wide, fit = 4 * y - 2, (y - y.min()) / (y.max() - y.min())
    order = shuffled(320)
    model = nn.Sequential(*classifier(1), activation())
    found = events_of(model, epochs(x, wide, order), F.mse_loss, lr=1e-3)
    assert list(found.index) == ["output_out_of_domain"]
    name = activation.__name__.lower()
    assert found["detail"].iloc[0] == f"{name} output, target beyond its range"
    model = nn.Sequential(*classifier(1), activation())
    assert events_of(model, epochs(x, fit, order), F.mse_loss, lr=1e-3).empty


# Ordinary programs of other kinds --------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_the_made_up_labels_of_a_gan_are_no_labels(together):
    torch.manual_seed(0)
    generator, critic = classifier(8), classifier(1)
    steppers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic)]
    real_label, fake_label = torch.ones(16, 1), torch.zeros(16, 1)
    loss_of = F.binary_cross_entropy_with_logits
    with NeuralDbg(generator, critic) as dbg:
        for _ in range(60):
            steppers[1].zero_grad()
            real = loss_of(critic(torch.randn(16, 8) + 1), real_label)
            fake = loss_of(critic(generator(torch.randn(16, 8)).detach()), fake_label)
            for loss in [real + fake] if together else [real, fake]:
                loss.backward()
            steppers[1].step()
            steppers[0].zero_grad()
            loss_of(critic(generator(torch.randn(16, 8))), real_label).backward()
            steppers[0].step()
    assert dbg.faults == []
    assert not MINE & set(dbg.events["event_type"])


def test_a_policy_that_settles_on_one_action_is_no_imbalance():
    x, _ = samples(960)
    batches = [(part, None) for part in x.split(16)]

    def policy_loss(out, y):
        action = torch.distributions.Categorical(logits=out).sample()
        worth = (action == 2).float() - 0.25
        return -(worth * out.log_softmax(1).gather(1, action[:, None])[:, 0]).mean()

    assert events_of(classifier(), batches, policy_loss, lr=0.3).empty


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, x):
        return self.head(self.mix(self.embed(x))).flatten(0, 1)


def test_text_whose_batches_hold_few_characters_is_not_ordered():
    torch.manual_seed(0)
    batches = []
    for step in range(60):
        text = torch.randint(0, 6, (4, 12)) + 6 * (step % 5)
        batches.append((text, text.roll(-1, 1).flatten()))
    assert events_of(Characters(), batches, F.cross_entropy).empty


def test_an_autoencoder_and_its_variational_kind():
    x, _ = samples(640)
    assert events_of(classifier(8), [(p, p) for p in x.split(16)], F.mse_loss, lr=0.01).empty

    def elbow(out, y):
        mean, log_var = out.chunk(2, 1)
        divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        return ((mean + torch.exp(log_var / 2) - y) ** 2).sum(1).mean() + divergence

    batches = [(p, p) for p in x.split(16)]
    assert events_of(classifier(16), batches, elbow, lr=1e-3).empty
