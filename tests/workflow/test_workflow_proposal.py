"""The experiment that `init` proposes for a folder of a few dozen images trains, samples and is evaluated."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_diffusion.core.config.yaml12 import from_text
from warm import warm_python

pytestmark = pytest.mark.slow


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [warm_python(), "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_proposed_experiment_trains_samples_and_is_evaluated(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(48):
        path = tmp_path / "images" / ("light" if number % 2 else "dark") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = generator.integers(128 * (number % 2), 128 + 128 * (number % 2), size=(20, 16, 3), dtype=np.uint8)
        Image.fromarray(values).save(path)
    asked = ("image_diffusion", "init", "mine", "--data", "images", "--cores", "1", "--budget")
    refused = run(tmp_path, *asked, "10s")
    assert refused.returncode == 1 and not (tmp_path / "mine").exists(), refused.stderr
    enough = re.search(r"The budget 10s is too small for 48 images .* Give at least (\d+)min\.", refused.stderr)
    assert enough is not None, refused.stderr
    created = run(tmp_path, *asked, f"{2 * int(enough[1])}min")
    assert created.returncode == 0 and "cd mine && snakemake --cores 1\n" in created.stdout, created.stderr
    assert "warning: 48 images are few" in created.stderr
    path = tmp_path / "mine/config/experiments/mine.yaml"
    proposed = from_text(path.read_text())
    assert proposed["train"]["steps"] >= 200
    # The speed of the machine decides how often each of the 48 images is seen, and so the augmentation against copies.
    passes = proposed["train"]["steps"] * proposed["train"]["global_batch"] / 48
    augment = {"probability": 0.25} if passes >= 600 else {"probability": 0}
    assert proposed["train"]["augment"] == augment
    assert proposed["train"].get("weights") == ("best" if passes >= 100 else None)
    # The same file with fewer steps, so that the test is short.
    path.write_text(path.read_text().replace(f"steps: {proposed['train']['steps']}", "steps: 20", 1))
    done = run(tmp_path / "mine", "snakemake", "--cores", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    # Output as short as in a clone: the project runs the workflow itself, not as a module.
    assert "mine/train done in " in done.stderr and "localrule" not in done.stdout + done.stderr
    results = tmp_path / "mine/results/mine"
    assert (results / "report/index.html").is_file()
    metrics = json.loads((results / "metrics.json").read_text())["metrics"]
    assert {"inpipe_fd", "copies"} <= metrics.keys()

    weights = ("--weights", "mine/results/mine/train")
    created = run(
        tmp_path, "image_diffusion", "init", "finer", *asked[3:-1], *weights, "--budget", f"{2 * int(enough[1])}min"
    )
    assert created.returncode == 0, created.stderr
    path = tmp_path / "finer/config/experiments/mine.yaml"
    finer = from_text(path.read_text())
    assert finer["system"]["network"].items() >= proposed["system"]["network"].items()
    assert finer["train"]["optimizer"]["lr"] == proposed["train"]["optimizer"]["lr"]
    path.write_text(path.read_text().replace(f"steps: {finer['train']['steps']}", "steps: 20", 1))
    done = run(tmp_path / "finer", "snakemake", "--cores", "1", "--", "results/mine/train/weights.safetensors")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensors as they are." in (tmp_path / "finer/logs/mine/train.log").read_text()
