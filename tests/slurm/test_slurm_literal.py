"""`snakemake --cores all --profile slurm`, as a user types it: every kind of job, training on two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, slurm_project, wait_until
from projects import ROOT, Project

RESULTS = [
    "results/datasets/dots-16/micro_codec/manifest.json",
    "results/micro_codec/train/weights.safetensors",
    "results/micro/train/weights.safetensors",
    "results/micro/samples/samples.npz",
    "results/micro/metrics.json",
]


def clone(folder: Path) -> Project:
    """Create the files of a clone, with the experiments and images of a small project instead of its own."""
    project = slurm_project(folder)
    for name in ("Snakefile", "profiles", "workflow", "src", "envs"):
        (folder / name).symlink_to(ROOT / name)
    for experiment in ("micro.yaml", "micro_codec.yaml"):
        shutil.copy(Path(__file__).with_name(experiment), folder / "config/experiments")
    return project


@pytest.fixture(scope="module")
def on_slurm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project finished on the cluster by the literal command."""
    project = clone(tmp_path_factory.mktemp("slurm") / "project")
    command = [str(Path(sys.executable).with_name("snakemake")), "--cores", "all", "--profile", "slurm"]
    with (project / "printed.log").open("w") as printed:
        done = subprocess.run(command, cwd=project.folder, stdout=printed, stderr=printed, check=False)
    assert done.returncode == 0, (project / "printed.log").read_text()[-5000:]
    return project


def with_python() -> dict[str, str]:
    """Return the environment variables of the active virtual environment."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_every_stage_was_a_job(on_slurm: Project) -> None:
    printed = (on_slurm / "printed.log").read_text()
    jobs = set(re.findall(r"has been submitted with SLURM jobid .*/rule_(\w+)/", printed))
    assert jobs == {"crop", "datasheet", "detect", "reference", "train", "encode", "sample", "evaluate"}
    assert printed.count("Asked of the queue") == 1
    assert re.search(r"^train +2 +gpu:2 +2 +6000 +10 +1$", printed, re.MULTILINE), "what it asks for stands there"


def test_training_was_four_processes_on_two_nodes(on_slurm: Project) -> None:
    agents = [path for path in (on_slurm / "logs/micro/train").iterdir() if path.is_dir()]
    assert [len(list(agent.glob("**/stderr.log"))) for agent in agents] == [2, 2]


def test_training_read_copies_of_the_shards(on_slurm: Project) -> None:
    manifest = json.loads((on_slurm / "results/datasets/dots-16/micro_codec/manifest.json").read_text())
    assert {path.name for path in (on_slurm / "near").iterdir() if len(path.name) == 64} == {
        shard["sha256"] for shard in manifest["shards"]
    }


def test_local_run_gives_same_bytes_as_slurm(on_slurm: Project, tmp_path: Path) -> None:
    alone = clone(tmp_path / "project")
    alone.run(*RESULTS)
    for result in RESULTS:
        assert (alone / result).read_bytes() == (on_slurm / result).read_bytes(), result


def test_second_run_has_nothing_to_do_locally_or_on_slurm(on_slurm: Project) -> None:
    assert on_slurm.planned() == set()
    assert on_slurm.planned("--profile", "slurm") == set()


@pytest.mark.long
def test_snakemake_itself_can_run_as_slurm_job(cluster: Cluster, on_slurm: Project) -> None:
    """The recipe of `make submit`, for a missing stage."""
    metrics = on_slurm / "results/micro/metrics.json"
    before = metrics.read_bytes()
    metrics.unlink()
    recipe = (ROOT / "Makefile").read_text().split("\nsubmit:")[1].split("\n\n")[0].partition("\n")[2]
    command = recipe.replace("\t", "").replace("$(SBATCH)", "--time=30")
    subprocess.run(["bash", "-euc", command], cwd=on_slurm.folder, env=with_python(), check=True)
    wait_until(lambda: not cluster.jobs(), 400)
    (log,) = (on_slurm / "logs").glob("submit-*.log")
    assert metrics.read_bytes() == before, log.read_text()[-3000:]
    assert "Asked of the queue" in log.read_text()


def test_dry_run_shows_requested_resources(on_slurm: Project) -> None:
    shown = on_slurm.run("--profile", "slurm", "--dry-run", "--forcerun", "train")
    for asked in ("nodes=2", "tasks=2", "gres=gpu:2", "cpus_per_task=2", "runtime=10", "slurm_extra=--signal=TERM@120"):
        assert asked in shown, asked


def test_site_settings_apply_to_all_jobs(on_slurm: Project, tmp_path: Path) -> None:
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
