"""A few minutes of the soak: every stage is killed three times, and no fault is silent."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from soak import STAGES, Soak, Tally, soak
from soak_project import ROOT, _listed

from image_diffusion.core.files.atomic import write_json
from warm import Warm, warm_server

LONGEST_S = 1800.0


@pytest.mark.slow
@pytest.mark.long
def test_no_fault_is_silent_if_every_stage_is_killed_three_times(tmp_path: Path) -> None:
    until = time.monotonic() + LONGEST_S

    def is_enough(tally: Tally) -> bool:
        assert time.monotonic() < until, tally.table()
        return all(tally.kills[stage] >= 3 for stage in ["snakemake", *STAGES])

    tally = soak(tmp_path / "soak", warm_server(), 17, ["dit", "latent", "prior"], is_enough, stop_s=2.0)
    assert sum(tally.silent.values()) == 0
    assert sum(tally.healed.values()) + sum(tally.told.values()) == sum(tally.injected.values())


def test_comparison_ignores_previews_of_other_lengths_but_not_damage(tmp_path: Path) -> None:
    write_json(tmp_path / "train/model.json", {"train": {"steps": 8, "grid_every_steps": 4}})

    def told(*steps: int, sha256: str = "a") -> bytes:
        files = {f"step-{step:07d}.png": sha256 for step in steps}
        write_json(tmp_path / "listing.json", {"files": files})
        return _listed(tmp_path / "listing.json", tmp_path)

    assert told(0, 4, 6, 8) == told(0, 4, 8, 12) == told(0, 4, 8)  # of 6 steps, and of 12
    assert told(0, 4, 8, sha256="b") != told(0, 4, 8) != told(0, 8)


def test_damage_tolerates_files_removed_by_leftover_processes(tmp_path: Path) -> None:
    run = Soak(tmp_path, Warm(tmp_path / "warm", ROOT / "src"), 0, ["dit"])
    state = run.project / "results" / "dit" / "train" / "state"
    state.mkdir(parents=True)
    is_over = threading.Event()

    def saves() -> None:
        while not is_over.is_set():
            (unfinished := state / ".step-0000000.tmp").mkdir()
            (unfinished / "file").write_bytes(b"bytes")
            (unfinished / "file").unlink(missing_ok=True)
            unfinished.rmdir()

    saving = threading.Thread(target=saves)
    saving.start()
    try:
        for number in range(3000):
            run._damage(random.Random(number), number, ["dit"])
    finally:
        is_over.set()
        saving.join()
        run.disk.close()
    assert run.tally.injected
