"""`snakemake --cores all --profile slurm`, as a user types it: every kind of job, training on two nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, slurm_project
from projects import ROOT, Project

RESULTS = [
    "results/datasets/dots-16/micro_codec/manifest.json",
    "results/micro_codec/train/weights.safetensors",
    "results/micro/train/weights.safetensors",
    "results/micro/samples/samples.npz",
    "results/micro/metrics.json",
]


def clone(folder: Path) -> Project:
    """The files a clone has, with the experiments and images of a small project in place of its own."""
    project = slurm_project(folder)
    for name in ("Snakefile", "workflow", "src", "envs"):
        (folder / name).symlink_to(ROOT / name)
    for experiment in ("micro.yaml", "micro_codec.yaml"):
        shutil.copy(Path(__file__).with_name(experiment), folder / "config/experiments")
    return project


@pytest.fixture(scope="module")
def on_slurm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Everything made on the cluster, by the literal command."""
    project = clone(tmp_path_factory.mktemp("slurm") / "project")
    command = [str(Path(sys.executable).with_name("snakemake")), "--cores", "all", "--profile", "slurm"]
    with (project / "printed.log").open("w") as printed:
        done = subprocess.run(command, cwd=project.folder, stdout=printed, stderr=printed, check=False)
    assert done.returncode == 0, (project / "printed.log").read_text()[-5000:]
    return project


def test_every_stage_was_a_job(on_slurm: Project) -> None:
    printed = (on_slurm / "printed.log").read_text()
    jobs = set(re.findall(r"has been submitted with SLURM jobid .*/rule_(\w+)/", printed))
    assert jobs == {"crop", "datasheet", "detect", "train", "encode", "sample", "evaluate"}


def test_training_was_four_processes_on_two_nodes(on_slurm: Project) -> None:
    agents = [path for path in (on_slurm / "logs/micro/train").iterdir() if path.is_dir()]
    assert [len(list(agent.glob("**/stderr.log"))) for agent in agents] == [2, 2]


def test_this_machine_alone_makes_the_same_bytes(on_slurm: Project, tmp_path: Path) -> None:
    alone = clone(tmp_path / "project")
    alone.run(*RESULTS)
    for result in RESULTS:
        assert (alone / result).read_bytes() == (on_slurm / result).read_bytes(), result


def test_a_second_time_there_is_nothing_to_do_here_or_there(on_slurm: Project) -> None:
    assert on_slurm.planned() == set()
    assert on_slurm.planned("--profile", "slurm") == set()


def test_a_dry_run_shows_what_would_be_asked_for(on_slurm: Project) -> None:
    shown = on_slurm.run("--profile", "slurm", "--dry-run", "--forcerun", "train")
    for asked in ("nodes=2", "tasks=2", "gres=gpu:2", "cpus_per_task=2", "runtime=10", "slurm_extra=--signal=TERM@120"):
        assert asked in shown, asked


def test_the_site_is_set_in_one_place(on_slurm: Project, tmp_path: Path) -> None:
    project = clone(tmp_path / "project")
    path = project / "config/config.yaml"
    path.write_text(
        path.read_text().split("slurm:")[0]
        + "slurm:\n  gpu_type: a100\n  every_stage: {slurm_partition: short, mem_mb: 1234, slurm_extra: --exclusive}\n"
        + "  stages: {train: {runtime: 1440}}\n"
    )
    shown = project.run("--profile", "slurm", "--dry-run")
    for asked in ("gres=gpu:a100:2", "gres=gpu:a100:1", "slurm_partition=short", "runtime=1440"):
        assert asked in shown, asked
    sent = [line for line in shown.splitlines() if "slurm_partition=" in line]
    assert sent and all("mem_mb=1234" in line and "slurm_extra=--exclusive" in line for line in sent), sent
    assert "slurm_extra=--exclusive --signal=TERM@120" in shown, "training is still told of the end of its time"
