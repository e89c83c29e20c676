"""Results on a GPU equal those on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from crops import crops_of_twelve
from image_diffusion.codecs.base import on_device
from image_diffusion.codecs.diffusers import KlCodec
from image_diffusion.core.random.streams import Streams
from image_diffusion.core.types import DataSpec
from image_diffusion.data.encoded.latents import EncodeConfig, encode_shards, write_manifest
from image_diffusion.data.shards.loader import Batches
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.distances import precision_recall
from image_diffusion.metrics.distances.precision_recall import manifold_estimates
from image_diffusion.metrics.images import memorization
from image_diffusion.metrics.images.memorization import find_feature_copies
from image_diffusion.networks.autoencoder import AutoencoderConfig
from image_diffusion.nn.linear import plain_products
from image_diffusion.nn.precision import Precision, computes_in, tf32
from image_diffusion.nn.transformer import Mlp
from image_diffusion.systems.diffusion.conditions.degradations import Edges, Gray, Hole, Small
from image_diffusion.systems.diffusion.conditions.encoded import TextCondition
from image_diffusion.systems.diffusion.conditions.paired_image import as_condition
from image_diffusion.systems.prior.generator import ImageStatistics, Scaling

CUDA = torch.device("cuda", 0)


def streams(device: torch.device) -> Streams:
    sample = torch.tensor([0, 3, 2**31 + 5, 2**33 + 7], device=device)
    return Streams(7, torch.tensor([0, 1, 2**31 - 1, 5], device=device), sample)


def test_random_numbers_equal_those_of_cpu() -> None:
    for shape in [(), (1,), (3, 5), (4, 32, 32)]:
        on_cpu, on_gpu = streams(torch.device("cpu")), streams(CUDA)
        assert torch.equal(on_gpu.integers("a", 1000, shape).cpu(), on_cpu.integers("a", 1000, shape))
        assert torch.equal(on_gpu.uniform("b", shape).cpu(), on_cpu.uniform("b", shape))
        for kind in ("normal", "gumbel"):
            ours, theirs = getattr(on_gpu, kind)("c", shape).cpu(), getattr(on_cpu, kind)("c", shape)
            torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=1e-12)


class Stored:
    """Samples in memory, read as shards are."""

    num_samples, shape, dtype = 37, (2, 4, 8, 8), torch.float16
    labels = np.arange(37)
    stored = torch.randn(37, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).half()

    def gather(self, indices: np.ndarray, flip: np.ndarray | None = None, out: torch.Tensor | None = None):  # type: ignore[no-untyped-def, type-arg]
        rows = self.stored[torch.from_numpy(indices)]
        return rows if out is None else out[: len(indices)].copy_(rows)

    def gather_joined(self, indices: object, flip: object = None) -> tuple[torch.Tensor, ...]:
        return ()


def test_batches_reach_gpu_unchanged() -> None:
    plain = iter(Batches(Stored(), 16, seed=3))  # type: ignore[arg-type]
    moved = iter(Batches(Stored(), 16, seed=3, device=CUDA))  # type: ignore[arg-type]
    for _ in range(20):
        ours, theirs = next(moved), next(plain)
        for name in ("stored", "label", "epoch", "sample"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name))


def test_neighbours_equal_those_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    made, real = torch.randn(500, 64, generator=draw), torch.randn(400, 64, generator=draw)
    found = [(manifold_estimates(made, real), find_feature_copies(made, real, made))]
    for module in (memorization, precision_recall):
        monkeypatch.setattr(module, "best_device", lambda: torch.device("cpu"))
    found.append((manifold_estimates(made, real), find_feature_copies(made, real, made)))
    (ours, near), (theirs, expected) = found
    assert {name: each.value for name, each in ours.items()} == {name: each.value for name, each in theirs.items()}
    torch.testing.assert_close(near.distance, expected.distance, rtol=1e-12, atol=0)
    assert torch.equal(near.nearest, expected.nearest)


def test_latents_equal_those_of_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = AutoencoderConfig(block_channels=(32, 64), latent_channels=4).build(DataSpec(channels=3, resolution=32))
    vae = network.vae.eval().requires_grad_(False)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    latents = torch.randn(4, 4, 16, 16)
    exact = KlCodec({}, lambda: vae, 1.0)
    moments, pixels = exact.encode(images), exact.decode(latents)
    on_gpu = KlCodec({}, lambda: on_device(vae, CUDA), 1.0)
    torch.testing.assert_close(on_gpu.encode(images).cpu(), moments, rtol=1e-3, atol=1e-4)
    decoded = on_gpu.decode(latents).cpu()
    assert (decoded.int() - pixels.int()).abs().max() <= 1
    assert decoded.is_contiguous()
    assert vae.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_shards_contain_outputs_of_codec(tmp_path: Path) -> None:
    """Batches are read ahead and written in separate threads."""
    torch.manual_seed(0)
    network = AutoencoderConfig(block_channels=(32, 64), latent_channels=4).build(DataSpec(channels=3, resolution=16))
    codec = KlCodec({"name": "kl"}, lambda: on_device(network.vae, CUDA), 1.0)
    crops = crops_of_twelve(tmp_path)
    settings = EncodeConfig(batch_size=4, dtype="float32", precision="float32")
    encode_shards(crops, tmp_path / "out", codec, settings, CUDA)
    write_manifest(crops, tmp_path / "out", codec, settings)
    images, latents = open_shards(crops, "all"), open_shards(tmp_path / "out", "all")
    for start in range(0, 12, 4):
        rows = np.arange(start, start + 4)
        with tf32(False):
            expected = codec.encode(images.gather(rows)).cpu()
        torch.testing.assert_close(latents.gather(rows), expected, rtol=1e-5, atol=1e-5)


def test_conditions_are_computed_without_waiting_for_gpu() -> None:
    images = torch.rand(4, 3, 16, 16, device=CUDA)
    captions = torch.rand(4, 2, 3, 8, device=CUDA)
    embeddings = torch.rand(4, 8, device=CUDA)
    masks = torch.randint(4, (4, 1, 16, 16), dtype=torch.uint8, device=CUDA)
    degradations = [Gray(), Edges(), Hole(), Small(4)]
    text = TextCondition.model_validate({"type": "text", "caption_weights": [0.75, 0.25]})
    scaling = Scaling(1.0, ImageStatistics(mean=(0.5,) * 8, std=(2.0,) * 8))
    drawn = streams(CUDA)
    for mode in ("default", "error"):  # the first round allocates
        torch.cuda.set_sync_debug_mode(mode)
        made = [degradation(images, drawn) for degradation in degradations]
        text.training_conditions(captions, drawn, DataSpec(channels=3, resolution=16))
        seen = as_condition(masks, 4)
        scaled = scaling.x(embeddings)
        torch.cuda.set_sync_debug_mode("default")
    for ours, degradation in zip(made, degradations, strict=True):
        theirs = degradation(images.cpu(), streams(torch.device("cpu")))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen.argmax(1, keepdim=True), masks)
    torch.testing.assert_close(scaled.cpu(), scaling.x(embeddings.cpu()))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_product_and_gelu_equals_separate_ones(precision: Precision, compiled: bool) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(96, 384).to(CUDA), 2 * torch.randn(4, 50, 96, device=CUDA)
    with torch.no_grad(), computes_in("float32", CUDA), plain_products():
        exact = mlp(x)
        hidden = mlp.fc1(x)
        expected = mlp.fc2(torch.nn.functional.gelu(hidden, approximate="tanh"))
    torch.testing.assert_close(exact, expected)
    if compiled:
        mlp.compile(dynamic=False)
    with torch.no_grad(), computes_in(precision, CUDA):
        ours = mlp(x)
    tolerance = {"float32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}[precision]
    torch.testing.assert_close(ours.float(), exact, rtol=tolerance, atol=tolerance)
