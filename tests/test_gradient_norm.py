"""The every-step gradient norm against the plain computation."""

import math

import pytest
import torch

from neuraldbg.capture.gradient_norm import VALUES_PER_TENSOR, gradient_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [[(3,)], [(5, 7), (2,), (1, 1, 4)], [(0,), (6,)], [()]])
def test_small_gradients_are_exact(dtype, shapes):
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    wanted = torch.cat([g.double().reshape(-1) for g in gradients]).norm()
    assert gradient_norm(gradients) == pytest.approx(float(wanted), rel=1e-3)


def test_large_ones_are_estimated_to_a_percent():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1000, 1000, generator=generator), torch.randn(10, generator=generator)]
    assert gradients[0].numel() > 20 * VALUES_PER_TENSOR
    assert gradient_norm(gradients) == pytest.approx(float(gradients[0].norm()), rel=0.02)


def test_views_sparse_tensors_and_those_with_a_graph_count():
    transposed = torch.arange(6.0).reshape(2, 3).t()
    sparse = torch.tensor([2.0, 0.0, 3.0, 0.0]).to_sparse()
    with_graph = torch.tensor([2.0], requires_grad=True) * 2
    wanted = math.sqrt(55 + 4 + 9 + 16)
    assert gradient_norm([transposed, sparse, with_graph]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "wanted"), [([1e25, 0.0], 1e25), ([math.inf, 1.0], math.inf), ([], math.nan)]
)
def test_extremes(values, wanted):
    gradients = [torch.tensor(values)] if values else []
    assert gradient_norm(gradients) == pytest.approx(wanted, nan_ok=True)


def test_a_gradient_that_is_not_a_number_gives_none():
    assert math.isnan(gradient_norm([torch.tensor([math.nan, 1.0]), torch.ones(2)]))


def test_on_a_device_nothing_is_read_before_it_is_asked_for():
    """Reading a tensor on the meta device raises."""
    value = gradient_norm([torch.ones(3, device="meta")])
    assert callable(value)
    with pytest.raises((RuntimeError, NotImplementedError)):
        value()
