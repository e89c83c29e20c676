"""GELU and its derivatives match PyTorch's, compiled and uncompiled."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from image_diffusion.nn.transformer import gelu


def test_compiled_gelu_and_its_derivatives_match_pytorch() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-12, 12, 4001), 3 * torch.randn(1000), torch.tensor([0.0, -0.0, -100.0, 1e4])])
    graphs = []

    def compiled_by(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    got, expected = torch.compile(gelu, fullgraph=True, backend=compiled_by)(ours), F.gelu(exact, approximate="tanh")
    assert "sigmoid" in graphs[0].code and "gelu" not in graphs[0].code
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.rand(x.shape)
    got.backward(weights)
    expected.backward(weights.double())  # type: ignore[no-untyped-call]
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-6, atol=2e-6)


def test_uncompiled_gelu_is_the_one_of_pytorch() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.linspace(-12, 12, 1001).to(dtype)
        assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
