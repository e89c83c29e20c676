"""GELU as it is computed here is PyTorch's, in value and in derivative, wherever it is computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from image_diffusion.nn.forward_mode import derivative
from image_diffusion.nn.gelu import gelu


def points() -> torch.Tensor:
    torch.manual_seed(0)
    ends = torch.tensor([0.0, -0.0, 1e-30, -100.0, 100.0, -1e4, 1e4])
    return torch.cat([torch.linspace(-12, 12, 4001), 3 * torch.randn(1000), ends])


def test_values_and_derivatives_are_those_of_pytorch() -> None:
    x = points()
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    got, expected = gelu(ours), F.gelu(exact, approximate="tanh")
    assert got.grad_fn is not None and got.grad_fn.name() == "_GeluBackward"
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.rand(x.shape)
    got.backward(weights)  # type: ignore[no-untyped-call]
    expected.backward(weights.double())  # type: ignore[no-untyped-call]
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-6, atol=2e-6)
    with torch.no_grad():
        assert torch.equal(gelu(x), got)


@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_a_number_does_not_depend_on_those_beside_it(size: int) -> None:
    x = points()
    assert torch.equal(gelu(x[:size]), gelu(x)[:size])


def test_compiled_it_is_the_same() -> None:
    x = points()
    compiled = torch.compile(gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), gelu(x), rtol=1e-6, atol=1e-6)


def test_elsewhere_pytorch_computes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x = points().to(dtype)
        assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
    x = points()
    along = derivative(gelu, (x,), (torch.ones_like(x),))
    exact = x.clone().requires_grad_()
    F.gelu(exact, approximate="tanh").sum().backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    torch.testing.assert_close(along, exact.grad, rtol=1e-5, atol=1e-5)
