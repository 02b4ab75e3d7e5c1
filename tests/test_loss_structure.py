"""What the graph behind a loss shows: unfit outputs, wrong axes, shapes that broadcast."""

# ruff: noqa: PLW0108
# (a graph of its own for every test)

import pytest
import torch
from torch import nn

from neuraldbg.capture.axes import find_wrong_axis
from neuraldbg.capture.broadcasting import find_broadcast
from neuraldbg.capture.graph_walk import walk
from neuraldbg.capture.loss_head import read_loss_terms
from neuraldbg.capture.output_domain import find_mismatch

F = nn.functional
N, C = 8, 5
LABELS = torch.arange(N) % C
VALUES = torch.linspace(-1, 1, N)


def scores(*shape):
    return nn.Linear(3, shape[-1])(torch.linspace(-1, 1, 3).expand(*shape[:-1], 3))


def column():
    return scores(N, 1)


BINARY = (VALUES > 0).float()[:, None]
MISMATCHED = {
    "softmax_then_cross_entropy": (
        lambda: F.cross_entropy(scores(N, C).softmax(1), LABELS), "softmax twice",
    ),
    "softmax_squeezed": (
        lambda: F.cross_entropy(scores(1, N, C).softmax(-1).squeeze(0), LABELS), "softmax twice",
    ),
    "softmax_transposed": (
        lambda: F.cross_entropy(
            scores(2, 4, C).softmax(-1).transpose(1, 2), LABELS.view(2, 4)
        ),
        "softmax twice",
    ),
    "softmax_then_log_softmax_gathered": (
        lambda: -scores(N, C).softmax(1).log_softmax(1).gather(1, LABELS[:, None]).mean(),
        "softmax twice",
    ),
    "sigmoid_then_cross_entropy": (
        lambda: F.cross_entropy(scores(N, C).sigmoid(), LABELS), "sigmoid before softmax",
    ),
    "softmax_then_nll": (
        lambda: F.nll_loss(scores(N, C).softmax(1), LABELS),
        "softmax where log-probabilities are due",
    ),
    "softmax_of_one_unit": (
        lambda: F.mse_loss(column().softmax(1), BINARY), "softmax of one unit",
    ),
    "softmax_of_one_unit_binary": (
        lambda: F.binary_cross_entropy(column().softmax(-1), BINARY), "softmax of one unit",
    ),
    "sigmoid_then_logits": (
        lambda: F.binary_cross_entropy_with_logits(column().sigmoid(), BINARY),
        "sigmoid before a loss that takes logits",
    ),
    "log_softmax_then_mse": (
        lambda: F.mse_loss(scores(N, C).log_softmax(1), torch.eye(C)[LABELS]),
        "log_softmax compared with values",
    ),
    "log_softmax_then_squares": (
        lambda: ((scores(N, C).log_softmax(1) - torch.eye(C)[LABELS]) ** 2).mean(),
        "log_softmax compared with values",
    ),
}  # fmt: skip
MATCHED = {
    "cross_entropy": lambda: F.cross_entropy(scores(N, C), LABELS),
    "log_softmax_twice_changes_nothing": lambda: F.cross_entropy(
        scores(N, C).log_softmax(1), LABELS
    ),
    "nll": lambda: F.nll_loss(scores(N, C).log_softmax(1), LABELS),
    "log_of_softmax": lambda: F.nll_loss(scores(N, C).softmax(1).log(), LABELS),
    "log_of_guarded_softmax": lambda: F.nll_loss((scores(N, C).softmax(1) + 1e-8).log(), LABELS),
    "picked_probabilities": lambda: -scores(N, C).softmax(1)[torch.arange(N), LABELS].log().mean(),
    "bce": lambda: F.binary_cross_entropy(column().sigmoid(), BINARY),
    "logits": lambda: F.binary_cross_entropy_with_logits(column(), BINARY),
    "brier": lambda: F.mse_loss(scores(N, C).softmax(1), torch.eye(C)[LABELS]),
    "regression": lambda: F.mse_loss(column(), VALUES[:, None]),
    "bounded_regression": lambda: F.mse_loss(column().tanh(), VALUES[:, None]),
    "hidden_sigmoid": lambda: F.cross_entropy(nn.Linear(C, C)(scores(N, C).sigmoid()), LABELS),
    "distillation": lambda: F.kl_div(
        scores(N, C).log_softmax(1), torch.full((N, C), 1 / C), reduction="batchmean"
    ),
}


def mismatches(loss):
    return [text for text in map(find_mismatch, read_loss_terms(loss)) if text is not None]


@pytest.mark.parametrize("case", MISMATCHED)
def test_an_output_that_does_not_suit_its_loss(case):
    make, text = MISMATCHED[case]
    assert mismatches(make()) == [text]


@pytest.mark.parametrize("case", MATCHED)
def test_an_output_that_suits_its_loss(case):
    assert mismatches(MATCHED[case]()) == []


B, T, H, D = 6, 10, 2, 4


def attention(axis, masked=False, batch=B):
    q, k, v = (scores(batch, H, T, D) for _ in range(3))
    similar = q @ k.transpose(-1, -2) / D**0.5
    if masked:
        similar = similar.masked_fill(torch.ones(T, T).triu(1).bool(), -1e9)
    return (F.dropout(similar.softmax(axis), 0.1) @ v).sum()


def transformer(batch, width, heads):
    layer = nn.TransformerEncoderLayer(width, heads, 8, batch_first=False)
    return layer(scores(T, batch, width)).sum()


def fairseq_heads(batch, heads, width):
    """Heads merged into the batch by a view between transpositions, as in fairseq."""
    q, k, v = (
        scores(T, batch, heads * width).view(T, batch * heads, width).transpose(0, 1)
        for _ in range(3)
    )
    mixed = (q @ k.mT).softmax(-1) @ v
    return mixed.transpose(0, 1).contiguous().view(T, batch, heads * width).sum()


WRONG_AXIS = {
    "log_softmax_over_batch": (
        lambda: F.nll_loss(scores(N, C).log_softmax(0), LABELS), "softmax over axis 0 of (8, 5)",
    ),
    "log_of_softmax_over_batch": (
        lambda: F.nll_loss(scores(N, C).softmax(0).log(), LABELS), "softmax over axis 0 of (8, 5)",
    ),
    "gathered_over_time": (
        lambda: -scores(2, 4, C).log_softmax(1).gather(2, LABELS.view(2, 4, 1)).mean(),
        "softmax over axis 1 of (2, 4, 5)",
    ),
    "flattened_over_time": (
        lambda: F.nll_loss(scores(2, 4, C).log_softmax(1).view(N, C), LABELS),
        "softmax over axis 1 of (2, 4, 5)",
    ),
    "soft_labels": (
        lambda: -(torch.eye(C)[LABELS] * scores(N, C).log_softmax(0)).sum(1).mean(),
        "softmax over axis 0 of (8, 5)",
    ),
    "attention_over_queries": (lambda: attention(-2), "attention: softmax over axis 2"),
    "attention_over_heads": (lambda: attention(1), "attention: softmax over axis 1"),
    "masked_attention": (lambda: attention(-2, True), "attention: softmax over axis 2"),
    "heads_viewed": (
        lambda: scores(B, T, H * D).view(B, H, T, D).sum(), "reshape of (6, 10, 8) to",
    ),
    "time_viewed_as_classes": (
        lambda: F.cross_entropy(
            scores(B, C, 7).reshape(-1, C), torch.zeros(B * 7, dtype=torch.long)
        ),
        "reshape of (6, 5, 7) to (42, 5)",
    ),
    "layers_viewed_as_features": (
        lambda: scores(2, 5, 3).view(5, 6).sum(), "reshape of (2, 5, 3) to (5, 6)",
    ),
    "channels_viewed_last": (
        lambda: scores(4, 3, 7, 7).reshape(4, 49, 3).sum(), "reshape of (4, 3, 7, 7)",
    ),
}  # fmt: skip
RIGHT_AXIS = {
    "log_softmax": lambda: F.nll_loss(scores(N, C).log_softmax(1), LABELS),
    "images": lambda: F.cross_entropy(
        scores(2, 4, 4, C).permute(0, 3, 1, 2), torch.zeros(2, 4, 4, dtype=torch.long)
    ),
    "sequence": lambda: F.cross_entropy(scores(2, 4, C).transpose(1, 2), LABELS.view(2, 4)),
    "transposed_log_softmax": lambda: F.nll_loss(
        scores(2, 4, C).log_softmax(-1).transpose(1, 2), LABELS.view(2, 4)
    ),
    "time_first": lambda: F.nll_loss(scores(4, 2, C).log_softmax(2).view(-1, C), LABELS),
    "soft_labels": lambda: F.cross_entropy(scores(N, C), torch.eye(C)[LABELS]),
    "attention": lambda: attention(-1),
    "masked_attention": lambda: attention(-1, True),
    "fused_attention": lambda: F.scaled_dot_product_attention(
        *(scores(B, H, T, D) for _ in range(3))
    ).sum(),
    "linear_attention": lambda: (
        scores(B, T, D).softmax(-1) @ (scores(B, T, D).softmax(1).transpose(1, 2) @ scores(B, T, D))
    ).sum(),
    "pooling_over_time": lambda: (scores(B, T, 1).softmax(1) * scores(B, T, D)).sum(),
    "heads": lambda: scores(B, T, H * D).view(B, T, H, D).transpose(1, 2).sum(),
    "heads_back": lambda: scores(B, H, T, D).transpose(1, 2).reshape(B, T, H * D).sum(),
    "torch_encoder": lambda: transformer(8, 32, 4),
    "torch_encoder_batch_is_head_width": lambda: transformer(8, 32, 4),
    "fairseq": lambda: fairseq_heads(4, 2, 8),
    "fairseq_batch_is_head_width": lambda: fairseq_heads(8, 2, 8),
    "patches": lambda: (
        scores(4, 3, 8, 8)
        .reshape(4, 3, 2, 4, 2, 4)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(4, 4, 48)
        .sum()
    ),
    "channel_shuffle": lambda: (
        scores(4, 6, 5, 5).view(4, 2, 3, 5, 5).transpose(1, 2).reshape(4, 6, 5, 5).sum()
    ),
    "flatten": lambda: scores(4, 3, 7, 7).flatten(1).sum(),
    "unflatten": lambda: scores(4, 3 * 49).view(4, 3, 7, 7).sum(),
    "relative_shift": lambda: scores(2, H, T, T + 1).view(2, H, T + 1, T).sum(),
    "grouped_codes": lambda: scores(B, 16, 64).view(-1, 16).sum(),
}


def wrong_axis(loss):
    return find_wrong_axis(walk(loss.grad_fn), read_loss_terms(loss))


@pytest.mark.parametrize("case", WRONG_AXIS)
def test_axes_taken_for_one_another(case):
    make, text = WRONG_AXIS[case]
    found = wrong_axis(make())
    assert found is not None
    assert found.startswith(text)


@pytest.mark.parametrize("case", RIGHT_AXIS)
def test_axes_in_their_places(case):
    assert wrong_axis(RIGHT_AXIS[case]()) is None


BROADCAST = {
    "mse": lambda: F.mse_loss(column(), VALUES),
    "mse_the_other_way": lambda: F.mse_loss(column().squeeze(1), VALUES[:, None]),
    "l1": lambda: F.l1_loss(column(), VALUES),
    "smooth_l1": lambda: F.smooth_l1_loss(column(), VALUES),
    "huber": lambda: F.huber_loss(column(), VALUES),
    "squares": lambda: ((column() - VALUES) ** 2).mean(),
    "squares_the_other_way": lambda: ((VALUES - column()) ** 2).mean(),
    "root": lambda: ((VALUES - column()) ** 2).mean().sqrt(),
    "summand": lambda: 0.5 * ((column() - VALUES) ** 2).mean() + nn.Linear(2, 2).weight.sum(),
    "log_likelihood": lambda: -(VALUES * column().sigmoid().log()).mean(),
    "policy": lambda: (
        -(VALUES[:, None] * scores(N, C).log_softmax(1)[torch.arange(N), LABELS]).mean()
    ),
}
NOT_BROADCAST = {
    "mse": lambda: F.mse_loss(column(), VALUES[:, None]),
    "squares": lambda: ((column().squeeze(1) - VALUES) ** 2).mean(),
    "one_sample": lambda: ((scores(1, 1) - torch.ones(1)) ** 2).mean(),
    "scale": lambda: ((torch.ones(1, requires_grad=True) * VALUES - VALUES) ** 2).mean(),
    "offset": lambda: ((column() - torch.ones(1)) ** 2).mean(),
    "several_targets_a_sample": lambda: ((column() - torch.ones(N, 3)) ** 2).mean(),
    "weights": lambda: (
        F.mse_loss(scores(N, C), torch.ones(N, C), reduction="none") * VALUES[:, None]
    ).mean(),
    "all_pairs": lambda: ((column().squeeze(1).unsqueeze(1) - VALUES.unsqueeze(0)) ** 2).mean(),
    "contrastive": lambda: F.cross_entropy(scores(N, 4) @ scores(N, 4).T, torch.arange(N)),
    "cross_entropy": lambda: F.cross_entropy(scores(N, C), LABELS),
}


def broadcast(loss):
    return find_broadcast(loss, read_loss_terms(loss))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("case", BROADCAST)
def test_every_prediction_against_every_target(case):
    found = broadcast(BROADCAST[case]())
    assert found is not None
    assert found.endswith("became (8, 8)")


@pytest.mark.parametrize("case", NOT_BROADCAST)
def test_ordinary_broadcasting(case):
    assert broadcast(NOT_BROADCAST[case]()) is None
