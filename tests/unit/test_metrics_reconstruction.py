"""PSNR and SSIM against torchmetrics and closed forms; codebook use for known counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from image_diffusion.metrics.features.base import Detected
from image_diffusion.metrics.images.reconstruction import (
    LpipsConfig,
    codebook_estimates,
    codebook_use,
    psnr,
    reconstruction_estimates,
    ssim,
)
from tiny_models import lpips_files


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    original = torch.randint(0, 256, (6, 3, 24, 32), generator=generator)
    noise = torch.randint(-20, 21, original.shape, generator=generator)
    return original.byte(), (original + noise).clamp(0, 255).byte()


def test_psnr_and_ssim_match_torchmetrics(pair: tuple[Tensor, Tensor]):
    functional = pytest.importorskip("torchmetrics.functional.image")
    original, decoded = (each.double() for each in pair)
    expected = functional.peak_signal_noise_ratio(decoded, original, 255.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(psnr(*pair), expected, rtol=1e-6, atol=0)
    # torchmetrics also averages windows over the mirrored border; the paper's are those inside the image.
    _, everywhere = functional.structural_similarity_index_measure(
        decoded, original, data_range=255.0, reduction="none", return_full_image=True
    )
    expected = everywhere[:, :, 5:-5, 5:-5].mean(dim=(1, 2, 3))
    torch.testing.assert_close(ssim(*pair), expected, rtol=1e-6, atol=1e-9)


def test_psnr_of_a_constant_error():
    black = torch.zeros(1, 1, 12, 12, dtype=torch.uint8)
    assert float(psnr(black, black + 51)) == pytest.approx(20 * 0.69897, rel=1e-5)  # 10 log10(25)
    assert float(psnr(black, black)) == 100 and float(ssim(black, black)) == 1


def test_estimates_of_a_perfect_codec():
    seen = Detected(torch.randn(100, 4), torch.randn(100, 5))
    found = reconstruction_estimates(seen, seen)
    assert found["same_class"].value == 1
    assert found["reconstruction_fd"].value == pytest.approx(0, abs=1e-9)


def test_codebook_use_of_known_counts():
    even, one = codebook_use(torch.tensor([5, 5, 5, 5])), codebook_use(torch.tensor([9, 0, 0, 0]))
    assert even == {"codebook_usage": 1, "codebook_perplexity": pytest.approx(4), "dead_codes": 0}
    assert one == {"codebook_usage": 0.25, "codebook_perplexity": pytest.approx(1), "dead_codes": 3}


def test_codebook_intervals_cover_the_true_perplexity():
    probabilities = torch.tensor([0.5, 0.3, 0.1, 0.1, 0.0]).double()
    truth = float(torch.exp(torch.special.entr(probabilities).sum()))
    covered = 0
    for seed in range(100):
        tokens = probabilities.multinomial(1000, True, generator=torch.Generator().manual_seed(seed)).view(20, 50)
        counts = torch.stack([row.bincount(minlength=5) for row in tokens])
        found = codebook_estimates(counts, 200)
        low, high = found["codebook_perplexity"].interval
        covered += low <= truth <= high
        assert found["codebook_usage"].value == 0.8 and found["dead_codes"].interval == (1, 1)
    assert 90 <= covered <= 99
    assert codebook_estimates(counts, 99)["dead_codes"].interval is None


def test_mistakes_are_told(pair: tuple[Tensor, Tensor]):
    with pytest.raises(ValueError, match=r"uint8 images of one shape; got torch\.uint8 .* and torch\.float32"):
        psnr(pair[0], pair[1].float())
    with pytest.raises(ValueError, match="at least 11 pixels"):
        ssim(pair[0][..., :8], pair[1][..., :8])


def test_lpips_matches_torchmetrics_with_the_same_weights(tmp_path: Path):
    functional = pytest.importorskip("torchmetrics.functional.image.lpips")
    pytest.importorskip("torchvision")
    config = lpips_files(tmp_path)
    theirs = functional._LPIPS(pnet_rand=True, model_path=str(config.heads))
    backbone = torch.load(config.backbone, weights_only=True)
    for slices in theirs.net.children():
        for name, layer in slices.named_children():
            if isinstance(layer, torch.nn.Conv2d):
                layer.load_state_dict({key: backbone[f"features.{name}.{key}"] for key in ("weight", "bias")})
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(0, 256, (2, 4, 3, 40, 48), generator=generator, dtype=torch.uint8)
    expected = theirs(first.float() / 127.5 - 1, second.float() / 127.5 - 1).flatten().double()
    found = config.build(torch.device("cpu"))(first, second)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found.min() > 0 and float(config.build(torch.device("cpu"))(first, first).abs().max()) == 0
    assert config.identity["backbone"] != config.identity["heads"]


def test_missing_and_invalid_lpips_weights_are_rejected(tmp_path: Path):
    config, cpu = lpips_files(tmp_path), torch.device("cpu")
    with pytest.raises(ValueError, match=r"lpips.heads is .*absent.pth, which does not exist"):
        LpipsConfig(backbone=config.backbone, heads=tmp_path / "absent.pth").build(cpu)
    with pytest.raises(ValueError, match="are not AlexNet and its LPIPS heads"):
        LpipsConfig(backbone=config.heads, heads=config.backbone).build(cpu)
    (tmp_path / "broken.pth").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a file of plain tensors"):
        LpipsConfig(backbone=tmp_path / "broken.pth", heads=config.heads).build(cpu)
    small = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="at least 32 pixels"):
        config.build(cpu)(small, small)


def test_lpips_weights_with_wrapper_prefixes_are_loaded(tmp_path: Path):
    config, cpu = lpips_files(tmp_path), torch.device("cpu")
    tensors = torch.load(config.heads, weights_only=True)
    torch.save({f"module.{name}": each for name, each in tensors.items()}, tmp_path / "wrapped.pth")
    wrapped = LpipsConfig(backbone=config.backbone, heads=tmp_path / "wrapped.pth").build(cpu)
    for one, other in zip(wrapped.heads, config.build(cpu).heads, strict=True):
        assert torch.equal(one, other)
