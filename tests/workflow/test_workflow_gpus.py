"""Jobs use several GPUs of a machine without a queue at once. CUDA_VISIBLE_DEVICES names them; none is needed."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from projects import Project
from test_workflow_latents import write_project

from image_diffusion.core.devices import REQUESTED

pytestmark = pytest.mark.slow

SAMPLES = "results/micro/samples"
EIGHT = ",".join(map(str, range(8)))

STAND_IN = """
import os, sys, time
from pathlib import Path

if sys.orig_argv[1:4] == ["-m", "image_diffusion", "sample"]:
    begun = Path("begun", os.environ["CUDA_VISIBLE_DEVICES"])
    begun.parent.mkdir(exist_ok=True)
    begun.touch(exist_ok=False)
    until = time.monotonic() + 60
    while len(list(begun.parent.iterdir())) < 8:
        if time.monotonic() > until:
            os._exit(9)
        time.sleep(0.01)
    Path(sys.orig_argv[sys.orig_argv.index("--output") + 1]).write_text(begun.name)
    os._exit(0)
"""
"""Run by Python at start-up instead of `sample`: waits until eight such processes run, and writes its device."""


@pytest.fixture
def shared(finished: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Project:
    """A finished project, made by one job after the other, that requests a GPU from now on."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(REQUESTED, "")  # the CPU stands in
    finished.edit(lambda experiment: experiment["resources"].update(gpus_per_node=1))
    return finished


def test_eight_sample_jobs_run_at_once_on_one_gpu_each(
    shared: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared.edit(lambda experiment: experiment["sample"].update(batch_size=2))
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT)
    parts = [f"{SAMPLES}/part-{part}-of-8.npz" for part in range(8)]
    replace(shared, cold=True).run("--cores", "8", *parts)
    assert {(shared / part).read_text() for part in parts} == set(EIGHT.split(","))


def test_number_of_gpus_changes_no_result_and_reruns_nothing(
    shared: Project, made: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared.planned() == set()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert shared.planned() == set(), "two jobs would share the samples now"
    (shared / SAMPLES / "samples.npz").unlink()
    assert re.search(r"^sample_part +2$", shared.run("--cores", "4"), re.MULTILINE)
    assert (shared / SAMPLES / "samples.npz").read_bytes() == (made / SAMPLES / "samples.npz").read_bytes()
    assert "Nothing to be done" in shared.run()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "Nothing to be done" in shared.run(), "one job would make them now"


def test_training_with_too_few_gpus_is_refused_before_any_work(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.edit(lambda experiment: experiment["resources"].update(gpus_per_node=8, processes_per_node=8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT)
    assert "train" in fresh.planned()
    done = fresh.snakemake("--resources", "devices=2")
    told = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert told == [
        "error: micro trains with 8 processes, each of which needs a GPU of its own, and this machine has 2 to use at "
        "once. Set resources.processes_per_node to 2 (--config nodes=1 processes_per_node=2), or use a larger one."
    ]
    assert not (fresh / "results/datasets/dots-16/crops").exists()


def test_latents_encoded_by_several_gpus_equal_those_of_one_and_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(REQUESTED, "")
    project, latents = write_project(tmp_path / "project", "fastdit"), "results/datasets/given-16/vae"
    project.edit(lambda experiment: experiment["resources"].update(gpus_per_node=1))
    manifest = f"{latents}/manifest.json"
    project.run(manifest)
    before = {path.name: path.read_bytes() for path in (project / latents).iterdir()}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert project.planned(manifest) == set()
    shutil.rmtree(project / latents)
    assert project.planned(manifest) == {"encode_part", "encode"}
    project.run(manifest)
    made = {path.name: path.read_bytes() for path in (project / latents).iterdir()}
    assert made.keys() == before.keys() and made["manifest.json"] == before["manifest.json"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert project.planned(manifest) == set()
