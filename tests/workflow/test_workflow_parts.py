"""Several jobs share a large data set: Snakemake plans them, and their output equals that of one job."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from projects import Project
from test_workflow_kills import signal_jobs, started

pytestmark = pytest.mark.slow

CROPS = "results/datasets/dots-16/crops"


def test_a_very_large_set_is_cropped_by_several_jobs(fresh: Project) -> None:
    """Sparse files with the size of four million images."""
    fresh.edit(lambda experiment: experiment["data"].update(num_shards=32))
    assert "crop_part" not in fresh.planned()
    for number in range(4):
        path = fresh / f"images/large-{number}.tar"
        path.touch()
        os.truncate(path, 10**11)
    shown = fresh.snakemake("--dry-run").stdout
    assert re.search(r"^crop_part +2$", shown, re.MULTILINE), shown
    assert f"{CROPS}/part-1-of-2.json" in shown


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="time limit", marks=pytest.mark.long), pytest.param(signal.SIGKILL, id="kill")],
)
def test_interrupted_crop_jobs_resume_and_equal_one_job(fresh: Project, made: Project, number: int) -> None:
    parts = [f"{CROPS}/part-{part}-of-2.json" for part in range(2)]
    with started(fresh, "--jobs", "1", *parts) as running:
        while not list((fresh / CROPS).glob("shard-*.tar")):
            assert running.poll() is None, "ended before anything was made"
            time.sleep(0.005)
        signal_jobs(running, fresh.folder, number)
    fresh.run(*parts)
    assert not (fresh / CROPS / "manifest.json").exists()
    fresh.run(f"{CROPS}/manifest.json")
    assert "(0 written)" in (fresh / "logs/datasets/dots-16/crop.log").read_text()
    for path in (made / CROPS).iterdir():
        if path.name != ".verified.json":
            assert (fresh / CROPS / path.name).read_bytes() == path.read_bytes(), path.name
