"""A second Snakemake samples a checkpoint, by a target, while the first one trains. Neither disturbs the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from projects import ROOT, Project

pytestmark = pytest.mark.slow


def test_checkpoint_target_runs_checkpoint_rules_only(fresh: Project) -> None:
    """Other files, here those of the codec, are locked while another Snakemake makes them."""
    for name in ("micro_dvae", "micro_latent"):
        shutil.copy(ROOT / "tests/workflow" / f"{name}.yaml", fresh / "config/experiments")
    settings = fresh / "config/config.yaml"
    settings.write_text(settings.read_text().replace("experiments: [micro]", "experiments: [micro_latent]"))
    planned = fresh.planned("results/micro_latent/checkpoints/latest/grid.png")
    assert planned == {"checkpoint_weights", "checkpoint_sample"}


def wait_for(pattern: str, folder: Path, running: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 240
    while not list(folder.glob(pattern)):
        assert running.poll() is None, "it has ended"
        assert time.monotonic() < until, pattern
        time.sleep(0.2)


def test_a_checkpoint_is_sampled_while_training_runs(fresh: Project) -> None:
    settings = fresh / "config/config.yaml"
    settings.write_text(settings.read_text().replace("every_s:", "every_s: 1"))
    fresh.edit(lambda experiment: experiment["train"].update(steps=10**6, validate_every_steps=None))
    fresh.edit(lambda experiment: experiment["train"]["checkpoint"].update(every_steps=20, keep_every=40))
    fresh.edit(lambda experiment: experiment["sample"].update(num_samples=1000, grid_images=6))
    weights, peeked = "results/micro/train/weights.safetensors", fresh / "results/micro/checkpoints"
    with subprocess.Popen(
        [*fresh.command(), weights],
        cwd=fresh.folder,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        try:
            wait_for("results/micro/train/state/*/step-0000040", fresh.folder, running)
            fresh.run("results/micro/checkpoints/latest/grid.png", "results/micro/checkpoints/40/grid.png")
            assert running.poll() is None and not (fresh / weights).exists(), "it goes on"
            model = json.loads((peeked / "40/model.json").read_text())
            assert (model["step"], model["ema"]) == (40, "ema-0.9999")
            first = json.loads((peeked / "latest/model.json").read_text())["step"]
            assert first >= 40
            wait_for(f"results/micro/train/state/*/step-{first + 40 - first % 40:07d}", fresh.folder, running)
            fresh.run("results/micro/checkpoints/latest/grid.png")
            assert json.loads((peeked / "latest/model.json").read_text())["step"] > first, "the newest is another now"
            assert "Nothing to be done" in fresh.run("results/micro/checkpoints/40/grid.png")
            assert running.poll() is None and not (fresh / weights).exists(), "it goes on"
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    assert "Traceback" not in (fresh / "logs/micro/train.log").read_text()

    fresh.edit(
        lambda experiment: experiment["train"].update(steps=40)
    )  # so that training ends at an existing checkpoint
    fresh.edit(lambda experiment: experiment["sample"].update(num_samples=6))
    fresh.run("results/micro/samples/samples.npz")
    with np.load(peeked / "40/samples.npz") as arrays:
        peeked_at = arrays["arr_0"]
    with np.load(fresh / "results/micro/samples/samples.npz") as arrays:
        assert np.array_equal(arrays["arr_0"], peeked_at)
