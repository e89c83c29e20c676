"""The command `evaluate` writes the same bytes for any number of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_diffusion.codecs.rgb import Rgb
from image_diffusion.core.config.base import dump, to_yaml
from image_diffusion.core.files.image_arrays import save_samples
from image_diffusion.core.files.weights import save_weights
from image_diffusion.core.journal.reader import read_journals
from image_diffusion.core.types import DataSpec
from image_diffusion.data.config import DataConfig
from image_diffusion.data.cropped.dataset import crop_dataset
from image_diffusion.data.shards.reader import open_shards
from image_diffusion.metrics.config import EvaluateConfig
from image_diffusion.metrics.features.base import Detected, detect_each
from image_diffusion.metrics.features.classifier_training import DetectorTraining, train_detector
from image_diffusion.metrics.samples import GeneratedRows, Samples
from image_diffusion.networks.dvae import DVAEConfig
from image_diffusion.samplers.ancestral import Ddim
from image_diffusion.stages import evaluate, sample, synthesize
from image_diffusion.systems.codec.dvae import DVAESystem
from image_diffusion.systems.diffusion.dit import DiTSystem
from image_diffusion.systems.diffusion.generator import SampleConfig
from warm import warm_python

SPEC = DataSpec(channels=3, resolution=16, num_classes=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops, a detector, a set of samples, and an untrained discrete VAE."""
    folder = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    for number in range(330):
        path = folder / "in" / ("light" if number % 2 else "dark") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        low = 100 * (number % 2)
        Image.fromarray(rng.integers(low, low + 128, (16, 16, 3), dtype=np.uint8)).save(path)
    source = {"type": "folder", "path": str(folder / "in")}
    data = DataConfig(name="x", source=source, resolution=16, num_shards=2, validation_fraction=0.35)  # type: ignore[arg-type]
    crop_dataset(data, folder / "crops")
    train, held_out = open_shards(folder / "crops", "train"), open_shards(folder / "crops", "validation")
    assert held_out.num_samples > 100
    train_detector(train, held_out, DetectorTraining(least_examples=1_000, epochs=1), folder / "detector")
    images = torch.from_numpy(rng.integers(0, 256, (130, 3, 16, 16), dtype=np.uint8))
    save_samples(folder / "samples.npz", images, torch.arange(130) % 2)
    torch.manual_seed(0)
    config = DVAEConfig(num_tokens=6, codebook_dim=5, num_layers=2, num_resnet_blocks=1, hidden_dim=8)
    codec = {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None}
    model = {"system": dump(DVAESystem(network=config)), "spec": dump(SPEC), "codec": codec}
    model |= {"classes": ["dark", "light"], "step": 1, "examples_seen": 1}
    network = config.build(SPEC)
    with torch.no_grad():
        network.encoder[-1].bias.zero_()  # type: ignore[union-attr, operator]
    save_weights(folder / "train", network.state_dict(), model)
    return folder


def judged(folder: Path, what: list[str], processes: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    (folder / "evaluate.yaml").write_text(to_yaml({"evaluate": dump(EvaluateConfig())}))
    output = folder / "metrics.json"
    output.unlink(missing_ok=True)
    given = ["--config", "evaluate.yaml", "--data", "crops", "--detector", "detector", "--output", "metrics.json"]
    given += ["--report", "report", *what]
    if processes == 1:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["evaluate", *given])
        evaluate.main()
    else:
        launch = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launch, "-m", "image_diffusion", "evaluate", *given]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return output.read_bytes()


@pytest.mark.parametrize(
    "what",
    [["--samples", "samples.npz"], ["--weights", "train/weights.safetensors"]],
    ids=["samples", "codec"],
)
@pytest.mark.slow
def test_metrics_are_identical_for_any_number_of_processes(
    folder: Path, what: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = judged(folder, what, 1, monkeypatch)
    assert any(entry["interval"] for entry in json.loads(expected)["metrics"].values())
    for processes in (2, 3):
        assert judged(folder, what, processes, monkeypatch) == expected


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """Samples of an untrained DiT, stored and not."""
    system = DiTSystem.model_validate({"type": "dit", "network": {"depth": 1, "width": 8, "num_heads": 2, "patch": 4}})
    codec = {"config": dump(Rgb()), "identity": Rgb().identity, "scale": None}
    model = {"system": dump(system), "spec": dump(SPEC), "codec": codec}
    model |= {"classes": ["dark", "light"], "step": 1, "examples_seen": 1}
    network = system.build_network(SPEC)
    streams = torch.Generator().manual_seed(0)
    for each in network.parameters():
        torch.nn.init.normal_(each, std=0.3, generator=streams)
    save_weights(folder / "dit", network.state_dict(), model)
    for name, keep in (("stored", True), ("judged", False)):
        settings = SampleConfig(num_samples=70, sampler=Ddim(num_steps=2), batch_size=11, grid_images=13, keep=keep)
        (folder / f"{name}.yaml").write_text(to_yaml({"sample": dump(settings)}))
        given = ["--config", folder / f"{name}.yaml", "--weights", folder / "dit/weights.safetensors"]
        sample.main([*map(str, given), "--output", str(folder / name / "samples.npz")])
    return folder


@pytest.mark.slow
def test_metrics_of_unstored_samples_are_identical(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ["--weights", "dit/weights.safetensors"]
    expected = judged(made, [*weights, "--samples", "stored/samples.npz"], 1, monkeypatch)
    drawn = {path.name: path.read_bytes() for path in (made / "report").iterdir()}
    assert {"classes.png", "nearest.png", "nearest-inpipe_copies.png"} <= drawn.keys()
    unstored = [*weights, "--samples", "judged/samples.npz"]
    for processes in (1, 2):
        assert judged(made, [*unstored, "--making", "judged.yaml"], processes, monkeypatch) == expected
        assert drawn == {path.name: path.read_bytes() for path in (made / "report").iterdir()}
    with pytest.raises(ValueError, match=r"holds 13 of 70 samples, since sample\.keep is false\. Set it to true"):
        judged(made, unstored, 1, monkeypatch)
    for name in ("grid.png", "steps.png"):
        assert (made / "judged" / name).read_bytes() == (made / "stored" / name).read_bytes()
    with np.load(made / "judged/samples.npz") as some, np.load(made / "stored/samples.npz") as all_of_them:
        assert len(some["arr_0"]) == len(some["arr_1"]) == 13
        assert (some["arr_0"] == all_of_them["arr_0"][:13]).all()


def test_each_batch_is_generated_once_per_pass() -> None:
    calls: list[slice] = []

    def make(rows: slice) -> torch.Tensor:
        calls.append(rows)
        return torch.arange(rows.start, rows.stop, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)

    samples = Samples(GeneratedRows(make, 70, 11, (2, 2, 3)), None, [])
    seen = detect_each([lambda images: Detected(images[:, 0, 0, :1].float())], samples)[0]
    assert seen.features[:, 0].tolist() == list(range(70))
    assert [rows.start for rows in calls] == [0, 11, 22, 33, 44, 55, 66] and calls[-1].stop == 70


@pytest.mark.slow
def test_failed_set_is_not_shown_as_released(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If only the sampler changes after `synthesize.require` failed, the next set is another run."""
    config = {"synthesize": {"per_class": 25, "require": "copies.value < -1", "classifier_steps": 1}}
    (tmp_path / "synthesize.yaml").write_text(to_yaml(config))
    files = f"--config {tmp_path}/synthesize.yaml --sample {tmp_path}/sample.yaml --data {made}/crops/manifest.json"
    files += f" --weights {made}/dit/weights.safetensors --detector {made}/detector/detector.json"
    monkeypatch.setattr(sys, "argv", ["synthesize", *files.split(), "--output", str(tmp_path / "synthetic")])
    sys.argv += ["--journal", str(tmp_path / "journal")]
    for num_steps in (1, 1, 2):
        settings = SampleConfig(num_samples=70, sampler=Ddim(num_steps=num_steps), batch_size=70)
        (tmp_path / "sample.yaml").write_text(to_yaml({"sample": dump(settings)}))
        with pytest.raises(ValueError, match=r"synthesize\.require does not hold"):
            synthesize.main()
    runs = read_journals(tmp_path / "journal" / "synthesize")
    assert [len(run.starts) for run in runs] == [2, 1]
    assert all(run.points for run in runs)
