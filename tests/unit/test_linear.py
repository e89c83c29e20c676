"""The linear layer of the networks matches PyTorch's values and gradients for every backend."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from image_diffusion.nn import linear as module
from image_diffusion.nn.linear import Linear, linear, plain_products
from image_diffusion.nn.transformer import Mlp


@pytest.fixture(params=["oneDNN", "MKL"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the backend of the matrix products in training."""
    monkeypatch.setattr(module, "_mkl_is_faster", lambda: request.param == "MKL")


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("tokens", [3, 300])  # below and above the threshold
@pytest.mark.parametrize("bias", [True, False])
def test_linear_values_and_gradients_match_pytorch(tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = Linear(96, 192, bias=bias), torch.randn(2, tokens, 96)
    parameters = tuple(layer.parameters())
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = layer(ours), F.linear(theirs, *parameters)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    mask = torch.randn(tokens, 192).expand(2, -1, -1)  # a gradient that is not contiguous
    for a, b in zip(
        torch.autograd.grad(got, (ours, *parameters), mask),
        torch.autograd.grad(expected, (theirs, *parameters), mask),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("processor", "capability", "mkl"),
    [
        ("vendor_id : GenuineIntel", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX512", False),  # MKL uses AVX2 there
        ("vendor_id : AuthenticAMD", "AVX2", True),
        ("", "AVX512", False),
    ],
)
def test_training_uses_mkl_on_processors_where_it_is_faster(
    processor: str, capability: str, mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_processor", lambda: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    choice = module._mkl_is_faster.__wrapped__()
    monkeypatch.setattr(module, "_mkl_is_faster", lambda: choice)
    assert choice == mkl
    layer, x = Linear(96, 192), torch.randn(600, 96)
    assert (layer(x).grad_fn.name() == "AddmmBackward0") == mkl  # type: ignore[union-attr]


def test_each_row_is_independent_of_other_rows() -> None:
    torch.manual_seed(0)
    layer, x = Linear(128, 96), torch.randn(600, 128)
    with torch.no_grad():
        whole = layer(x)
        assert all(torch.equal(layer(x[:rows]), whole[:rows]) for rows in (2, 7, 40, 64, 333))


@pytest.mark.parametrize("shape", [(3, 5, 96), (96,), (0, 96), (70, 96)])
def test_small_inputs_are_padded_with_rows(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """As with an older PyTorch: the padding rows do not change the result."""
    monkeypatch.setattr(module, "_FEWEST_ROWS", 64)
    torch.manual_seed(0)
    layer, x = Linear(96, 192), torch.randn(shape)
    with torch.no_grad():
        got, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_unneeded_gradients_are_not_computed() -> None:
    x, weight = torch.randn(4096, 64), torch.randn(64, 64, requires_grad=True)
    linear(x, weight, None).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_autocast_still_chooses_the_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(64, 64)(torch.randn(4096, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "gradient", "plain", "fused"),
    [
        ("cuda", False, False, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("cpu", False, False, False),
    ],
)
def test_gelu_is_fused_on_gpus_without_gradients(device: str, gradient: bool, plain: bool, fused: bool) -> None:
    """With fake tensors; `tests/gpu` compares the numbers."""
    module.register_operations()
    with FakeTensorMode(), torch.device(device), torch.set_grad_enabled(gradient):
        mlp, x = Mlp(8, 32), torch.empty(2, 3, 8)
        with FlopCounterMode(display=False) as counter, plain_products() if plain else nullcontext():
            assert mlp(x).shape == (2, 3, 8)
    assert counter.get_total_flops() == 2 * 2 * 6 * 8 * 32
    assert (torch.ops.aten._addmm_activation in counter.get_flop_counts()["Global"]) == fused


def test_stages_start_without_importing_triton() -> None:
    """Triton alone takes a tenth of the time that a stage needs to start."""
    code = "import sys, image_diffusion.stages.sample, image_diffusion.stages.train; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
