"""Precision of networks outside training: it applies to the network alone, and only during its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.types import DataSpec
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.nn.precision import computing_in, tf32
from image_diffusion.objectives.denoising import Denoising
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.samplers.guidance import Guidance
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator, SampleConfig
from image_diffusion.training.optim import numerics

SPEC = DataSpec(channels=3, resolution=8, num_classes=2)
SYSTEM = DiTSystem(
    network=DiTConfig(depth=2, width=32, num_heads=2, patch=2), objective=Denoising(label_drop_probability=0.1)
)


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    with tf32(False):
        yield
    torch.compiler.reset()


def switches() -> tuple[bool, bool]:
    assert torch.backends.mkldnn.matmul.fp32_precision != "tf32", "a CPU computes as it always does"
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("name", "expected"), [("float32", (False, False)), ("tf32", (True, True)), ("bf16", (True, True))]
)
def test_precision_applies_only_within_the_network(name: Any, expected: tuple[bool, bool]) -> None:
    seen: list[Any] = []
    layer = nn.Linear(4, 4)

    def network(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        out: Tensor = layer(x)
        seen.append((switches(), out.dtype))
        return out

    for outer in (False, True):
        with tf32(outer):
            before = switches()
            out = computing_in(network, name)(torch.randn(2, 4), torch.zeros(2))
            assert out.dtype == torch.float32
            assert switches() == before
    assert seen == [(expected, torch.bfloat16 if name == "bf16" else torch.float32)] * 2


def test_errors_restore_the_precision_switches() -> None:
    def network(x: Tensor, t: Tensor, /, **cond: Tensor) -> Tensor:
        raise RuntimeError

    before = switches()
    with pytest.raises(RuntimeError):
        computing_in(network, "tf32")(torch.zeros(1), torch.zeros(1))
    assert switches() == before


def test_training_in_float32_reports_the_gain_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 48e12, torch.bfloat16: 788e12}
    monkeypatch.setattr(numerics, "product_rate", lambda _, dtype: rates[dtype])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    gpu = torch.device("cuda", 0)
    assert numerics.faster_precision(torch.float32, gpu) == (
        "train.precision is float32, in which this GPU does 48 TFLOP/s; in bf16 it does 788. train.precision: bf16 "
        "trains most networks as well, and faster."
    )
    assert numerics.faster_precision(torch.bfloat16, gpu) is None
    assert numerics.faster_precision(torch.float32, torch.device("cpu")) is None
    rates[torch.bfloat16] = 50e12
    assert numerics.faster_precision(torch.float32, gpu) is None


@pytest.mark.parametrize("capability", ["AVX2", "AVX512_BF16"])
def test_training_in_bf16_on_cpus_without_avx512_recommends_float32(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    advice = numerics.faster_precision(torch.bfloat16, torch.device("cpu"))
    if capability == "AVX2":
        assert advice is not None and advice.endswith("train.precision: float32 is faster on this machine.")
    else:
        assert advice is None


def generator(**settings: Any) -> Generator:
    torch.manual_seed(0)
    network = SYSTEM.build_network(SPEC).eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    config = SampleConfig(sampler=Ddim(num_steps=3), guidance=Guidance(guidance_scale=2.0), batch_size=5, **settings)
    codec: Any = Rgb().build(None, None, torch.device("cpu"), torch.float32)
    return Generator(network, SYSTEM.reading, SPEC, codec, config)


def test_images_in_bf16_are_close_to_those_in_float32() -> None:
    seeds, labels = torch.arange(4), torch.tensor([0, 1, 0, 1])
    exact, coarse = (generator(precision=name)(seeds, labels).int() for name in ("float32", "bf16"))
    difference = (exact - coarse).abs()
    assert 0 < difference.max() < 30
    assert difference.float().mean() < 2
    assert torch.equal(generator(precision="tf32")(seeds, labels).int(), exact)  # TF32 affects only products on a GPU


def test_compiled_network_receives_one_batch_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is padded; trajectories are computed without compilation."""
    shapes: list[Any] = []
    whole = nn.Module.compile

    def count(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        shapes.append({len(x) for x in inputs if x.ndim == 3})
        return graph.forward  # type: ignore[no-any-return]

    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: whole(module, backend=count, **options))
    labels = torch.tensor([0, 1, 0, 1, 1])
    compiled, eager = generator(compile=True), generator()
    for rows in (slice(0, 5), slice(0, 2), slice(4, 5)):
        seeds = torch.arange(5)[rows]
        torch.testing.assert_close(compiled(seeds, labels[rows]), eager(seeds, labels[rows]), atol=1, rtol=0)
    assert len(shapes) == 5  # for patches, times, labels, a block, the final layer
    assert {10} in shapes  # with and without label
    compiled.trajectory(torch.arange(3), labels[:3])
    assert len(shapes) == 5


def test_decoding_takes_a_few_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vae = AutoencoderConfig(block_channels=(16, 32), latent_channels=2).build(DataSpec(channels=3, resolution=16)).vae
    codec, x = KlCodec({}, vae.eval, 1.0), torch.randn(7, 2, 8, 8)
    decoded = codec.decode(x)
    counts: list[int] = []
    decode = vae.decode
    monkeypatch.setattr(vae, "decode", lambda part: counts.append(len(part)) or decode(part))
    monkeypatch.setattr("image_diffusion.codecs.base._PIXELS_AT_ONCE", 3 * 16 * 16)
    assert torch.equal(codec.decode(x), decoded)
    assert counts == [3, 3, 1]
    counts.clear()
    monkeypatch.setattr("image_diffusion.codecs.base._PIXELS_AT_ONCE", 1)
    assert torch.equal(codec.decode(x), decoded)
    assert counts == [1] * 7
