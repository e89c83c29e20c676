"""Published checkpoints of other projects: their configuration files, and sampling by one command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import image_diffusion.__main__
from image_diffusion.core.config.base import load
from image_diffusion.core.types import DataSpec
from image_diffusion.foreign.diffusion import PUBLISHED
from image_diffusion.networks.dit import DiTConfig
from image_diffusion.process.flow import Flow
from image_diffusion.stages import sample
from image_diffusion.stages.export import Published, read_published
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import Generator
from image_diffusion.training.load_model import load_codec, load_model
from tiny_autoencoders import write_autoencoder

FOLDER = Path(__file__).parents[2] / "config" / "published"
DIT = FOLDER / "dit_xl2_imagenet256.yaml"


def test_every_known_checkpoint_has_a_configuration_file() -> None:
    files = [load(Published, path).file for path in sorted(FOLDER.glob("*.yaml"))]
    enlarge = {
        "upsample_cond_500K",
        "64_256_upsampler",
        "128_512_upsampler",
    }  # upsamplers of images, without checkpoints
    assert len(set(files)) == len(files)
    assert {Path(file).stem for file in files} == set(PUBLISHED) - enlarge | {
        "DiT-XL-2-256x256", "DiT-XL-2-512x512", "SiT-XL-2-256x256"
    }  # fmt: skip


def test_one_command_samples_a_published_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = DiTConfig(depth=1, width=384, num_heads=6, patch=2, time_frequencies="dit")
    built = network.build(DataSpec(channels=4, resolution=4, num_classes=1000), learned_variance=True)
    torch.save(built.state_dict(), tmp_path / "DiT-XL-2-256x256.pt")
    write_autoencoder("sd", tmp_path / "vae")
    raw = yaml.safe_load(DIT.read_text())
    raw["sample"]["sampler"]["num_steps"] = 2
    config = tmp_path / "dit.yaml"
    config.write_text(yaml.safe_dump(raw))
    given = ["--published", config, "--read", tmp_path / "DiT-XL-2-256x256.pt", "--codec", tmp_path / "vae"]
    sample.main([*map(str, given), "--num", "3", "--output", str(tmp_path / "out")])
    assert "CC BY-NC 4.0, not for commercial use" in capsys.readouterr().out
    with np.load(tmp_path / "out/samples/samples.npz") as samples:
        assert samples["arr_0"].shape == (3, 32, 32, 3) and samples["arr_1"].tolist() == [207, 360, 387]
    assert (tmp_path / "out/samples/grid.png").is_file() and (tmp_path / "out/train/model.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--published", "x.yaml", "--output", "out"], "--published needs .*--read, --output"),
        (["mine", "--read", "x.pt"], "--read and --codec go with --published"),
    ],
)
def test_published_and_read_options_require_each_other(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample.main(words)


def test_removed_published_command_names_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["image-diffusion", "published", "--config", "x.yaml"])
    with pytest.raises(SystemExit, match="sample --published FILE --read FILE"):
        image_diffusion.__main__.main()


def test_published_sit_checkpoint_is_read_as_flow_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = DiTConfig(depth=1, width=384, num_heads=6, patch=2, time_frequencies="dit")
    built = network.build(DataSpec(channels=4, resolution=4, num_classes=1000), learned_variance=True)
    torch.save(built.state_dict(), tmp_path / "SiT-XL-2-256x256.pt")
    write_autoencoder("sd", tmp_path / "vae")
    read_published(
        FOLDER / "sit_xl2_imagenet256.yaml", tmp_path / "SiT-XL-2-256x256.pt", str(tmp_path / "vae"), tmp_path / "out"
    )
    model = load_model(tmp_path / "out")
    assert isinstance(model.system, DiTSystem) and isinstance(model.system.process, Flow)
    assert not model.system.learns_variance and model.system.network.depth == 1
    settings = load(Published, FOLDER / "sit_xl2_imagenet256.yaml").sample
    codec = load_codec(model, None, torch.device("cpu"))
    settings = settings.model_copy(update={"sampler": settings.sampler.model_copy(update={"num_steps": 2})})
    images = Generator(model.network, model.system.reading, model.spec, codec, settings)(
        torch.arange(1), torch.tensor([207])
    )
    assert images.shape == (1, 3, 32, 32)


def test_wrong_checkpoint_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"does not exist. Get DiT-XL-2-256x256.pt from https://github.com/facebookres"
    ):
        read_published(DIT, tmp_path / "DiT-XL-2-256x256.pt", None, tmp_path)
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"describes DiT-XL-2-256x256.pt, but --read is .*other.pt"):
        read_published(DIT, tmp_path / "other.pt", None, tmp_path)
    raw = yaml.safe_load(DIT.read_text()) | {"file": "other.pt", "sha256": "0" * 64}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ValueError, match="is damaged, or another file: its sha256 is not 0000"):
        read_published(tmp_path / "x.yaml", tmp_path / "other.pt", None, tmp_path)
