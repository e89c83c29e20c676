"""A user's mistake is reported in one line before any work begins."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from projects import Project

pytestmark = pytest.mark.slow


def told(project: Project, *arguments: str) -> str:
    """Run Snakemake, which must fail with one line and no work done, and return this line."""
    done = project.snakemake(*arguments)
    assert done.returncode == 1
    usual = ("Config file config/config.yaml", "Using workflow specific profile ")
    lines = [line for line in done.stdout.strip().splitlines() if not line.startswith(usual)]
    assert len(lines) == 1, done.stdout
    assert not (project / "results/datasets/dots-16/crops").exists()
    return lines[0]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda experiment: experiment["train"].update(stpes=3),
            "error: config/experiments/micro.yaml: train.stpes is not a known key. Did you mean train.steps?",
        ),
        (
            lambda experiment: experiment.update(codec={"type": "stability"}),
            "error: config/experiments/micro.yaml: Unknown codec 'stability'. Known: ",
        ),
        (
            lambda experiment: experiment["data"].update(resolution=18),
            "error: config/experiments/micro.yaml: ",
        ),
    ],
)
def test_invalid_experiment(fresh: Project, change: Callable[[dict[str, Any]], object], line: str) -> None:
    fresh.edit(change)
    assert told(fresh).startswith(line)


def test_missing_folder_of_images(fresh: Project) -> None:
    shutil.rmtree(fresh / "images")
    assert "images" in told(fresh)


def test_folder_without_images(fresh: Project) -> None:
    shutil.rmtree(fresh / "images")
    (fresh / "images").mkdir()
    assert "holds no files" in told(fresh)


def test_results_inside_the_images(fresh: Project) -> None:
    fresh.edit(lambda experiment: experiment["data"]["source"].update(path="."))
    line = told(fresh)
    assert line.startswith("error: dots-16: data.source.path: . contains the folder of results results, whose pictures")


def test_fewer_images_than_a_batch(fresh: Project) -> None:
    fresh.edit(lambda experiment: experiment["train"].update(global_batch=1000))
    line = told(fresh)
    assert line.startswith("error: config/experiments/micro.yaml: images holds ")
    assert "fewer than one batch of train.global_batch = 1000" in line


def test_missing_experiment(fresh: Project) -> None:
    line = told(fresh, "--config", "experiments=[macro]")
    assert line.startswith("error: config/experiments/macro.yaml does not exist. Did you mean micro?")


def test_missing_base(fresh: Project) -> None:
    (fresh / "config/experiments/mine.yaml").write_text("base: mikro\n")
    line = told(fresh, "mine")
    assert line.startswith("error: config/experiments/mine.yaml: base is mikro, but config/experiments/mikro.yaml does")


@pytest.mark.parametrize("name", ["config.yaml", "experiments/micro.yaml"])
def test_duplicate_key(fresh: Project, name: str) -> None:
    path = fresh / "config" / name
    first = next(line for line in path.read_text().splitlines() if line and line[0].isalpha())
    path.write_text(f"{path.read_text()}\n{first}\n")
    key = first.partition(":")[0]
    assert f"error: config/{name} is not valid YAML: line " in told(fresh, "--config", "results=elsewhere")
    assert f"the key {key} occurs here and in line " in told(fresh, "--config", "results=elsewhere")


def test_misspelt_workflow_key(fresh: Project) -> None:
    line = told(fresh, "--config", "reslts=elsewhere")
    assert line == "error: config/config.yaml: reslts is not a known key. Did you mean results?"


@pytest.mark.parametrize("is_dry", [True, False])
def test_results_in_use_by_another_snakemake_keep_their_configuration(fresh: Project, is_dry: bool) -> None:
    """A Snakemake that works in the results from another folder keeps the configuration that it has read."""
    fresh.planned()
    configuration = {path: path.read_bytes() for path in fresh.folder.glob("results/**/config/*")}
    assert configuration
    fresh.edit(lambda experiment: experiment["train"].update(steps=12))
    with (fresh / "results/.owner").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        other.write("process 1 on here, started in /elsewhere")
        other.flush()
        line = told(fresh, *(["--dry-run"] if is_dry else []))
    assert line.startswith("error: Another Snakemake works in results: process 1 on here, started in /elsewhere. ")
    assert {path: path.read_bytes() for path in configuration} == configuration


def test_dry_run_warns_when_it_changes_configuration_of_running_snakemake(fresh: Project) -> None:
    said = "warning: Another Snakemake works in this folder, and its next stages read the configuration that has"
    fresh.planned()
    with (fresh / ".snakemake/owner").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert said not in fresh.run("--dry-run")
        fresh.edit(lambda experiment: experiment["train"].update(steps=12))
        assert said in fresh.run("--dry-run")
        assert said not in fresh.run("--dry-run")


def test_tracking_settings_of_wrong_type(fresh: Project) -> None:
    line = told(fresh, "--config", "tracking=x")
    assert line == "error: config/config.yaml: tracking: 'x' is not of type 'object'."
    path = fresh / "config/config.yaml"
    path.write_text(re.sub("(?m)^  uri: .*", "  uri: 5", path.read_text()))
    assert told(fresh) == "error: config/config.yaml: tracking.uri: 5 is not of type 'string'."


def test_corrected_experiment_is_planned(fresh: Project) -> None:
    fresh.edit(lambda experiment: experiment["train"].update(stpes=3))
    told(fresh, "--dry-run")
    fresh.edit(lambda experiment: experiment["train"].pop("stpes"))
    assert {"crop", "train", "sample"} <= fresh.planned()
