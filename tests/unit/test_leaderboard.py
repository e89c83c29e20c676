"""The leaderboard: requirements of an entry, the order of entries, and the page generated from them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import leaderboard as board  # noqa: E402

from image_diffusion.core.files.atomic import read_json  # noqa: E402

ENTRIES = sorted((ROOT / "docs" / "leaderboard").glob("*.json"))


def entry(note: str, *runs: tuple[float, float, float], codec_cpu_s: float = 0.0) -> dict[str, Any]:
    """An entry with these runs: CPU seconds, agreement and distance of each."""
    keys = ("cpu_s", "agreement", "distance")
    return {
        "note": note,
        "date": "2026-11-27",
        "commit": "abc",
        "codec_cpu_s": codec_cpu_s,
        "runs": [{"steps": 10, "images_seen": 640, **dict(zip(keys, run, strict=True))} for run in runs],
    }


def test_best_entry_is_first_with_its_gain_over_the_next() -> None:
    slow, fast = entry("slow", (30.0, 0.97, 2.0), (10.0, 0.96, 2.0)), entry("fast", (12.0, 0.99, 1.0))
    lines = board.rendered(board.TRACKS["digits"], [slow, fast]).splitlines()[-2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][0] == "fast" and cells[0][3:6] == ["12.0", "12.0", "40%"]
    assert cells[1][0] == "slow" and cells[1][3:6] == ["20.0", "30.0, 10.0", ""]


def test_every_seed_must_reach_the_required_agreement() -> None:
    fault = board.TRACKS["digits"].fault
    assert fault(entry("good", (1.0, 0.95, 1.0), (1.0, 0.99, 1.0))) is None
    assert "94.9%" in str(fault(entry("bad", (1.0, 0.949, 1.0), (1.0, 0.99, 1.0))))


def test_every_seed_must_stay_within_the_budget_including_the_codec() -> None:
    fault = board.TRACKS["cifar10"].fault
    assert fault(entry("good", (1000.0, 0.5, 5.0), (1500.0, 0.5, 5.0), codec_cpu_s=300.0)) is None
    assert "1,801" in str(fault(entry("bad", (1000.0, 0.5, 5.0), (1500.0, 0.5, 5.0), codec_cpu_s=301.0)))


@pytest.mark.slow
@pytest.mark.long
def test_entry_below_the_track_requirement_is_rejected_after_training(tmp_path: Path) -> None:
    output = tmp_path / "entry.json"
    small = ["train.steps=2", "train.schedule.warmup_steps=0", "train.ema.rates=[0.1]", "sample.sampler.num_steps=1"]
    line = [sys.executable, str(ROOT / "tests" / "bench" / "leaderboard.py"), "--track", "digits", "--note", "small"]
    line += ["--experiment", "jit_demo", "--seeds", "0", "--output", str(output)]
    line += [word for change in small for word in ("--set", change)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "error: no entry: a seed has" in done.stderr, done.stderr
    assert "'steps': 2, 'images_seen': 128, 'cpu_s': " in done.stdout and not output.exists()


def test_other_image_settings_are_rejected(tmp_path: Path) -> None:
    arguments = argparse.Namespace(experiment="jit_demo", images=None, changes=["data.resolution=16"])
    with pytest.raises(SystemExit, match="resolution"):
        board.entry_of(board.TRACKS["digits"], arguments, tmp_path)


def test_only_diffusion_systems_are_accepted(tmp_path: Path) -> None:
    arguments = argparse.Namespace(experiment="dvae_demo", images=None, changes=[])
    with pytest.raises(SystemExit, match="dvae_demo is a .*diffusion system"):
        board.entry_of(board.TRACKS["digits"], arguments, tmp_path)


@pytest.mark.parametrize("path", ENTRIES, ids=[path.stem for path in ENTRIES])
def test_entries_have_three_seeds_and_meet_their_track_requirements(path: Path) -> None:
    kept = read_json(path)
    assert board.TRACKS[kept["track"]].fault(kept) is None
    assert len({run["seed"] for run in kept["runs"]}) == len({run["weights_sha256"] for run in kept["runs"]}) == 3


def test_leaderboard_page_is_generated_from_the_entries() -> None:
    assert ENTRIES
    assert board.PAGE.read_text(encoding="utf-8") == board.page()
