"""Cost of a mirror for a training: steps a second with a mirror and without, in pairs.

    OMP_NUM_THREADS=1 python tests/bench/bench_mirror.py --pairs 5
    python tests/bench/bench_mirror.py --mirror s3://bucket/bench    (credentials and address as botocore finds them)

Each pair trains the same small DiT twice, by the command that everybody uses, one after the other in the order of a
coin; the mirror is empty at first and gets every checkpoint. Counted are the seconds between the first logged step and
the last one, those included in which a checkpoint is written. Wanted: a median ratio of at most 1.02. The mirror's
process needs a core beside those of the training: on a busy machine the spread of the pairs says how much to believe.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from image_diffusion.core.journal.reader import read_journal

ROOT = Path(__file__).resolve().parents[2]
IMAGES, SIDE, BATCH, LOGGED = 64, 32, 16, 10
NETWORK = {"depth": 4, "width": 192, "num_heads": 4, "patch": 4}
WANTED = 1.02


def experiment(steps: int, checkpoint: int) -> dict[str, object]:
    """Return the training as a configuration."""
    return {
        "data": {
            "name": "noise",
            "source": {"type": "folder", "path": "images"},
            "resolution": SIDE,
            "num_shards": 2,
            "validation_fraction": 0.25,
        },
        "system": {"type": "dit", "network": NETWORK},
        "train": {
            "steps": steps,
            "global_batch": BATCH,
            "checkpoint": {"every_steps": checkpoint},
            "log_every_steps": LOGGED,
            "validate_every_steps": steps,
            "grid_every_steps": None,
        },
        "sample": {"num_samples": 8, "sampler": {"type": "ddim", "num_steps": 2}},
        "resources": {"cpus_per_process": 1, "memory_mb": 4000, "runtime_min": 60},
    }


def write_project(folder: Path, given: argparse.Namespace) -> None:
    """Write the images and the configuration of a project."""
    (folder / "config" / "experiments").mkdir(parents=True)
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = generator.integers(0, 256, size=(SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:03}.png")
    settings = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    settings["experiments"] = ["bench"]
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(settings))
    text = yaml.safe_dump(experiment(given.steps, given.checkpoint))
    (folder / "config" / "experiments" / "bench.yaml").write_text(text)


def command(folder: Path, target: str, mirror: dict[str, object] | None) -> None:
    """Make one file of the project, with a mirror or without."""
    config = folder / "config" / "config.yaml"
    settings = yaml.safe_load(config.read_text()) | {"mirror": mirror}
    config.write_text(yaml.safe_dump({key: value for key, value in settings.items() if key != "mirror" or mirror}))
    line = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1", target]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(done.stdout)


def seconds_of_a_step(folder: Path) -> float:
    """Train, and return the mean seconds of a step between the first logged one and the last."""
    history = read_journal(folder / "results" / "bench" / "journal" / "train")
    assert history is not None
    rates = sorted((point.step, point.value) for point in history.points if point.key == "speed/steps_per_second")
    return statistics.fmean(1 / rate for _, rate in rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="trainings with a mirror and without (5)")
    parser.add_argument("--steps", type=int, default=400, help="of each training (400)")
    parser.add_argument("--checkpoint", type=int, default=100, help="steps between checkpoints (100)")
    parser.add_argument("--mirror", help="a URL; by default a folder beside the project")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between looks for new results (5)")
    given = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "project")
        write_project(folder, given)
        command(folder, "results/datasets/noise-32/crops/manifest.json", None)
        for number in range(given.pairs):
            seconds = {}
            for is_mirrored in random.Random(number).sample([False, True], 2):
                for each in ("results/bench", ".snakemake/mirror"):
                    shutil.rmtree(folder / each, ignore_errors=True)
                url = f"{given.mirror or f'file://{temporary}/mirror'}/{number}"
                mirror = {"url": url, "every_s": given.every_s, "silence_s": 4 * given.every_s}
                command(folder, "results/bench/train/weights.safetensors", mirror if is_mirrored else None)
                seconds[is_mirrored] = seconds_of_a_step(folder)
            ratios.append(seconds[True] / seconds[False])
            print(
                f"pair {number}: {1000 * seconds[False]:.1f} ms a step without, {1000 * seconds[True]:.1f} ms with "
                f"a mirror, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    middle = statistics.median(ratios)
    print(f"median ratio {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), wanted {WANTED} at most")


if __name__ == "__main__":
    main()
