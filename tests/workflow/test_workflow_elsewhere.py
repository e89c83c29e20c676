"""The rules used from another folder: as a module of another workflow, and with `snakemake --directory`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow


def documented() -> str:
    """Return the Snakefile in docs/module.md."""
    page = (ROOT / "docs/module.md").read_text()
    return page.split("```python\n")[1].split("```")[0]


def write_own_workflow(folder: Path, **changes: str) -> Project:
    """Write a folder with images, experiments and the documented Snakefile, with changes to its text."""
    project = make_project(folder)
    tracking = {"uri": "sqlite:///mlflow.db", "project": "mine"}
    config = {"diffusion": {"experiments": ["micro_latent"], "results": "models", "tracking": tracking}}
    (project / "config/config.yaml").write_text(yaml.safe_dump(config))
    text = documented()
    for old, new in {"/path/to/image-diffusion": str(ROOT), "flowers": "micro_latent", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    (project / "Snakefile").write_text(text)
    for name in ("micro_dvae", "micro_latent"):
        shutil.copy(ROOT / "tests/workflow" / f"{name}.yaml", project / "config/experiments")
    project.edit(lambda experiment: experiment.pop("encode"), "micro_dvae")
    return Project(folder, snakefile=project / "Snakefile")


def test_as_a_module_of_another_workflow(tmp_path: Path) -> None:
    own = write_own_workflow(tmp_path / "own")
    ends = [f"models/micro_latent/{name}" for name in ("tracked.json", "report/index.html")]
    own.run("gallery.html", *ends)
    models = own / "models"
    assert (models / "micro_latent/samples/samples.npz").is_file()
    assert (models / "datasets/dots-16/micro_dvae/manifest.json").is_file()
    assert "inpipe_fd" in json.loads((models / "micro_latent/metrics.json").read_text())["metrics"]
    assert json.loads((models / "micro_latent/tracked.json").read_text())["project"] == "mine"
    assert not (own / "results").exists()
    # Its own rule ran both of its commands, and the package wrote no owner file for a folder that is not its own.
    image = "<img src=models/micro_latent/samples/grid.png>"
    assert (own / "gallery.html").read_text() == f"<h1>Flowers</h1>\n{image}\n"
    assert not (own / ".snakemake/owner").exists()

    assert own.planned("gallery.html", *ends) == set()
    of_the_codec = {f"diffusion_{stage}" for stage in ("all", "evaluate", "track", "report", "summary")}
    assert own.planned("diffusion_all") == of_the_codec
    own.edit(lambda experiment: experiment["sample"].update(num_samples=8), "micro_latent")
    after = {f"diffusion_{stage}" for stage in ("sample", "evaluate", "track", "report")}
    assert own.planned("gallery.html", *ends) == after | {"gallery"}


def test_the_first_rule_of_the_other_workflow_stays_its_default(tmp_path: Path) -> None:
    own = write_own_workflow(tmp_path / "own")
    planned = own.planned()
    assert {"gallery", "diffusion_sample"} <= planned
    assert "diffusion_report" not in planned


def test_a_prefix_of_paths_is_refused_with_one_line(tmp_path: Path) -> None:
    own = write_own_workflow(tmp_path / "own", **{"    config:\n": '    prefix:\n        "elsewhere"\n    config:\n'})
    done = own.snakemake("--dry-run")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("error: The module has a prefix, which does not reach")


def test_rules_without_package_end_with_error(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    shutil.copy(ROOT / "Snakefile", tmp_path)
    shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    done = Project(project.folder, snakefile=tmp_path / "Snakefile", cold=True).snakemake("--dry-run")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"error: There are rules in {tmp_path}, but no package. Clone the repository, and name its Snakefile."
    ]


def test_directory_option_runs_in_another_folder(finished: Project, made: Project, tmp_path: Path) -> None:
    shutil.rmtree(finished / "results/micro/samples")
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(
        [*finished.command(), "--directory", finished.folder],
        cwd=tmp_path / "cwd",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for path in ("samples/samples.npz", "metrics.json"):
        assert (finished / "results/micro" / path).read_bytes() == (made / "results/micro" / path).read_bytes()
    assert list((tmp_path / "cwd").iterdir()) == []
    assert finished.planned() == set()
