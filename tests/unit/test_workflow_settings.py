"""Settings of config/config.yaml and the command line are checked before any work; an error is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.workflow.resolve import check_settings

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text())
GOOD = {"experiments": ["mine"], "results": "results", "tracking": {"uri": "sqlite:///mlflow.db", "project": "p"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiments").mkdir()
    for name in ("mine", "demo"):
        (tmp_path / "experiments" / f"{name}.yaml").touch()
    return tmp_path


def check(folder: Path, changes: dict[str, Any]) -> None:
    check_settings(GOOD | changes, SCHEMA, folder / "config.yaml", folder / "experiments", folder / "studies")


def test_valid_settings_are_accepted(folder: Path) -> None:
    check(folder, {})
    (folder / "config.yaml").write_text("experiments: [mine]\n")
    check(folder, {"experiments": ["mine", "demo"], "slurm": {"gpu_type": None}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiments": ["mien"]}, "experiments/mien.yaml does not exist. Did you mean mine? Known: demo, mine."),
        ({"experiments": ["xyz"]}, "experiments/xyz.yaml does not exist. Known: demo, mine."),
        ({"experimets": ["mine"]}, "config.yaml: experimets is not a known key. Did you mean experiments?"),
        (
            {"tracking": {**GOOD["tracking"], "projct": "x"}},  # type: ignore[dict-item]
            "config.yaml: tracking.projct is not a known key. Did you mean tracking.project?",
        ),
        ({"slurm": {"zzz": 1}}, "config.yaml: slurm.zzz is not a known key. Known: every_stage, gpu_type, stages."),
        ({"nodes": 0}, "config.yaml: nodes: 0 is less than the minimum of 1."),
        ({"experiments": []}, "config.yaml: experiments: [] should be non-empty."),
    ],
)
def test_a_mistake_is_one_line(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(folder, changes)
    assert str(caught.value) == f"{folder}/{message}"


def test_duplicate_keys_are_rejected(folder: Path) -> None:
    (folder / "config.yaml").write_text("experiments: [mine]\nresults: a\nresults: b\n")
    with pytest.raises(ValueError, match="line 3, column 1: the key results occurs here and in line 2; keep one of"):
        check(folder, {})


@pytest.mark.parametrize("project", [".", "..", "x" * 81])
def test_project_that_cannot_name_a_folder_is_refused(folder: Path, project: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(folder, {"tracking": {**GOOD["tracking"], "project": project}})  # type: ignore[dict-item]
    assert str(caught.value) == (
        f"{folder}/config.yaml: tracking.project: '{project}' is not valid. The MLflow experiment that holds the runs: "
        "at most 80 characters, and not only dots."
    )


@pytest.mark.parametrize("name", ["a b", "-x", "../x", "datasets", "studies", "summary.html"])
def test_names_that_cannot_be_folders_of_results_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(folder, {"experiments": [name]})
    assert str(caught.value) == (
        f"{folder}/config.yaml: experiments.0: '{name}' is not valid. A name has letters, digits, dots, hyphens and "
        "underscores, begins with a letter or digit, and is not datasets, studies or summary.html."
    )
