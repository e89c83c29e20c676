"""Weight averages of other widths, reconstructed after training."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_diffusion.core.files.atomic import read_json
from image_diffusion.core.files.weights import read_weights, save_weights
from image_diffusion.stages import ema as verb
from image_diffusion.training.checkpoint.averaged_weights import coefficients, inner_products, reconstruct
from image_diffusion.training.checkpoint.checkpoint import Checkpoint, part_list_path, write_checkpoint, write_rows
from image_diffusion.training.optim.ema import Averages, PowerEma, power_of_width

WIDTHS, STEPS, EVERY = (0.05, 0.1), 800, 40


def test_inner_products_match_numerical_integrals() -> None:
    s = (np.arange(400_000) + 0.5) / 100_000  # midpoints in 0 … 4

    def profile(t: float, gamma: float) -> np.ndarray:
        return np.where(s < t, (gamma + 1) * s**gamma / t ** (gamma + 1), 0.0)

    for t, g, u, h in [(2.0, 3.0, 4.0, 7.5), (4.0, 0.5, 1.5, 6.0), (3.0, 5.0, 3.0, 5.0)]:
        (found,) = inner_products(*(np.array([value]) for value in (t, g, u, h))).flat
        assert found == pytest.approx((profile(t, g) * profile(u, h)).mean() * 4, rel=1e-4)


def test_stored_average_reconstructs_itself() -> None:
    gamma = power_of_width(0.1)
    found = coefficients([100, 200, 200], [gamma, gamma, power_of_width(0.05)], 200, gamma)
    assert found == pytest.approx([0.0, 1.0, 0.0], abs=1e-9)


def written_by_two(folder: Path, checkpoint: Checkpoint, *settings: Any) -> None:
    """Write a checkpoint of two processes, each with a half of w."""
    halves = {group: tensors.pop("w").chunk(2) for group, tensors in checkpoint.groups.items()}
    first, second = (
        replace(checkpoint, rows={group: {"w": half[part]} for group, half in halves.items()}, part=part, parts=2)
        for part in (0, 1)
    )

    def others(folder: Path, part: int) -> dict[str, Any]:
        write_rows(folder, second)
        files: dict[str, Any] = read_json(part_list_path(folder, part))
        return files

    write_checkpoint(folder, first, *settings, others=others)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with checkpoints of a random walk, and true averages of other widths in truth.json."""
    folder = tmp_path_factory.mktemp("state")
    weights = torch.zeros(6)
    kept, truth = (Averages(PowerEma(widths=widths), weights) for widths in (WIDTHS, (0.03, 0.07, 0.2)))
    draw = torch.Generator().manual_seed(0)
    identity = {"train": {"ema": {"type": "power", "widths": list(WIDTHS)}}}
    for step in range(1, STEPS + 1):
        weights += 0.05 * torch.randn(6, generator=draw)
        kept.update(step)
        truth.update(step)
        if step % EVERY == 0:
            groups = {name: {"w": vector} for name, vector in kept.vectors.items()}
            groups["network"] = {"w": weights, "buffer": torch.ones(2)}
            taken = Checkpoint(step, 4 * step, False, groups)
            write = write_checkpoint if step % (2 * EVERY) else written_by_two
            write(folder, taken, identity, {}, lambda: None)
    (folder / "truth.json").write_text(json.dumps({name: v.tolist() for name, v in truth.vectors.items()}))
    return folder


@pytest.mark.parametrize("width", [0.03, 0.07, 0.2])
def test_reconstructed_average_of_a_new_width_is_close_to_the_true_average(trained: Path, width: float) -> None:
    tensors, step = reconstruct(trained, width)
    expected = torch.tensor(json.loads((trained / "truth.json").read_text())[f"ema-{width:g}"])
    assert step == STEPS
    newest, _ = reconstruct(trained, 0.1)
    assert (tensors["w"] - expected).norm() < 0.02 * (newest["w"] - expected).norm() + 2e-3
    assert torch.equal(tensors["buffer"], torch.ones(2))


def reconstructed(state: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **model: Any) -> tuple[Any, Any]:
    """Run the ema command for width 0.07 on a training whose final weights have this model record."""
    about = {"step": STEPS, "examples_seen": 4 * STEPS, "ema": "ema-0.05", **model}
    save_weights(folder / "train", {"w": torch.zeros(6)}, about)
    options = {"state": state, "weights": folder / "train/weights.safetensors", "width": "0.07"}
    options["output"] = folder / "out/weights.safetensors"
    monkeypatch.setattr(
        sys, "argv", ["ema", *(str(word) for key, value in options.items() for word in (f"--{key}", value))]
    )
    verb.main()
    return read_weights(folder / "out")


def test_ema_command_writes_a_weights_folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, model = reconstructed(trained, tmp_path, monkeypatch)
    assert torch.equal(tensors["w"], reconstruct(trained, 0.07)[0]["w"])
    assert (model["ema"], model["step"], model["examples_seen"]) == ("ema-0.07", STEPS, 4 * STEPS)


@pytest.mark.parametrize("ended", [{"train": {"steps": 400}}, {"train": {"steps": STEPS}, "ended_early_at": 400}])
def test_only_checkpoints_of_the_run_that_wrote_the_weights_are_used(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[str, Any]
) -> None:
    run, other = tmp_path / "state/aaaa", tmp_path / "state/bbbb"
    for folder in (run, other):
        shutil.copytree(trained, folder)
    about = {"fingerprint": "aaaa", "step": 80, "examples_seen": 320, **ended}  # as with train.weights: best
    for state in (run, run.parent):
        tensors, model = reconstructed(state, tmp_path, monkeypatch, **about)
        assert torch.equal(tensors["w"], reconstruct(trained, 0.07, last_step=400)[0]["w"])
        assert (model["step"], model["examples_seen"]) == (400, 1600)
    with pytest.raises(ValueError, match=r"bbbb is not of the run aaaa, which ended with .*\.safetensors\. Give"):
        reconstructed(other, tmp_path, monkeypatch, **about)


def test_missing_checkpoints_and_other_averages_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        reconstruct(tmp_path, 0.1)
    identity = {"train": {"ema": {"type": "exponential"}}}
    write_checkpoint(tmp_path, Checkpoint(1, 1, False, {"network": {}}), identity, {}, lambda: None)
    with pytest.raises(ValueError, match="of type exponential. Only power"):
        reconstruct(tmp_path, 0.1)


def test_damaged_average_is_reported(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "state")
    path = tmp_path / "state/step-0000400/ema-0.05.1-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=r"step-0000400 is damaged: ema-0\.05\.1-of-2\.safetensors has another sha256"):
        reconstruct(tmp_path / "state", 0.1)
