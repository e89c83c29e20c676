"""A small experiment in three jobs: one for its data set, one for its codec, one for itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import CROPS, Cluster, finish, slurm_project, snakemake, steps_saved, wait_until
from projects import Project

from image_diffusion.tools.init import begin

RESULTS = ["results/micro_codec/metrics.json", "results/micro/train/weights.safetensors", "results/micro/metrics.json"]


ASKED = {"one_job": True, "gpus_per_node": 0, "cpus_per_process": 1, "memory_mb": 3000, "runtime_min": 10}


def small(folder: Path) -> Project:
    """Create both experiments of the literal command, on CPUs, a job each; the second runs long enough to be
    stopped."""
    project = slurm_project(folder)
    for name in ("micro", "micro_codec"):
        path = folder / "config/experiments" / f"{name}.yaml"
        shutil.copy(Path(__file__).with_name(path.name), path)
        project.edit(lambda experiment: experiment.update(resources=ASKED), name)
    project.edit(lambda experiment: experiment["train"].update(steps=300, checkpoint={"every_steps": 20}))
    return project


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project finished on this machine, undisturbed."""
    project = small(tmp_path_factory.mktemp("alone") / "project")
    project.run(*RESULTS)
    return project


def test_three_jobs_are_enough_and_cancelled_one_resumes(cluster: Cluster, tmp_path: Path, alone: Project) -> None:
    project = small(tmp_path / "project")
    with snakemake(project) as running:
        wait_until(lambda: steps_saved(project) > 20, 300)
        (job,) = [line.split()[0] for line in cluster.jobs("RUNNING")]
        subprocess.run(["scancel", job], check=True)
        assert running.wait(600) == 0
    printed = (project / "printed.log").read_text()
    sent = re.findall(r"has been submitted with SLURM jobid \d+ \(log: \S*/group_(\S+)/\d+\.log\)", printed)
    assert sent[:2] == ["data_dots-16_crop_datasheet_detect_reference", "micro_codec_encode_evaluate_train"]
    assert sent[2:] == ["micro_evaluate_sample_train"] * 2, "once more after it was cancelled"
    assert re.search(r"^evaluate, sample, train +1 +1 +3000 +30 +1$", printed, re.MULTILINE)
    for result in RESULTS:
        assert (project / result).read_bytes() == (alone / result).read_bytes(), result


@pytest.mark.usefixtures("cluster")
def test_a_project_of_init_sends_jobs(tmp_path: Path, alone: Project) -> None:
    begin(tmp_path / "mine")
    project = Project(tmp_path / "mine", snakefile=tmp_path / "mine/Snakefile")
    shutil.copytree(alone / "config", project / "config", dirs_exist_ok=True)
    shutil.copytree(alone / "images", project / "images")
    finish(project, CROPS)
    assert (project / CROPS).read_bytes() == (alone / CROPS).read_bytes()
    assert "has been submitted with SLURM jobid" in (project / "printed.log").read_text()


def test_a_mistake_in_a_shared_job_is_one_line(project: Project) -> None:
    project.edit(lambda experiment: experiment.update(resources=ASKED))
    project.edit(lambda experiment: experiment["train"].update(optimizer={"type": "adamw", "lr": 10}))
    with snakemake(project, "results/micro/metrics.json", "--retries", "0") as running:
        assert running.wait(300) == 1
    printed = (project / "printed.log").read_text()
    assert len(re.findall(r"submitted with SLURM jobid \d+ \(log: \S*/group_micro_", printed)) == 1
    told = re.findall(r"^error: micro/train \(job \d+, n\d\) failed and would fail so again: ", printed, re.MULTILINE)
    assert len(told) == 1
