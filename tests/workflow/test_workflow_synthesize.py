"""A synthetic data set of a model: made once, read by other programs, and quarantined if its scores are too low."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projects import Project, make_project
from test_workflow_kills import signal_jobs, started

from image_diffusion.core.files.atomic import read_checksums, sha256_file

pytestmark = pytest.mark.slow

TARGET = "results/micro/synthetic"
QUICK = {"per_class": 12, "classifier_seeds": 2, "classifier_steps": 2}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project whose synthetic data set was released."""
    project = make_project(tmp_path_factory.mktemp("released") / "project")
    set_section(project, **QUICK, require="utility.gain.upper > -1")
    project.run()
    return project


def set_section(project: Project, **section: Any) -> None:
    project.edit(lambda experiment: experiment.update(synthesize=section))


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".snakemake_timestamp"
    }


def test_released_data_set_is_complete_tracked_and_made_once(released: Project) -> None:
    from torchvision.datasets import ImageFolder

    folder = released / "results/micro/synthetic"
    images = ImageFolder(str(folder / "images"))
    assert images.classes == ["dark", "light"] and images.targets == [0] * 12 + [1] * 12
    with np.load(released / "results/micro/samples/samples.npz") as arrays:  # the same seeds and classes
        assert np.array_equal(np.asarray(images[0][0]), arrays["arr_0"][0])
    assert read_checksums(folder) == {name: s for name, s in files_of(folder).items() if name != "SHA256SUMS"}
    scores = json.loads((folder / "scorecard.json").read_text())["scores"]
    assert scores["utility.gain"]["lower"] <= scores["utility.gain"]["value"] <= scores["utility.gain"]["upper"]
    assert "12 |" in (folder / "README.md").read_text() and "Released." in (folder / "index.html").read_text()
    with sqlite3.connect(released / "mlflow.db") as store:
        keys = {key for (key,) in store.execute("SELECT DISTINCT key FROM metrics")}
        logged = dict(store.execute("SELECT name, digest FROM datasets"))
    assert {"utility.gain.lower", "membership.auc", "inpipe_fd"} <= keys
    assert sha256_file(folder / "SHA256SUMS").startswith(logged["micro/synthetic"]) and logged["micro/synthetic"]
    assert list(released.folder.glob("mlartifacts/**/index.html")) or list(released.folder.glob("mlruns/**/index.html"))
    assert released.planned() == set()


def test_data_set_below_required_scores_is_quarantined(released: Project) -> None:
    released_files = files_of(released / "results/micro/synthetic")
    set_section(released, **QUICK, require="utility.gain.lower > 1 and copies.upper < 0.01")
    done = released.snakemake(TARGET)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "error: synthesize.require does not hold" in line)
    assert "utility.gain.lower is " in line and "copies.upper was not measured" in line
    assert not (released / "results/micro/synthetic").exists()
    kept = released / "results/micro/quarantine"
    assert "Not released." in (kept / "index.html").read_text()
    same = {name for name, sha256 in files_of(kept).items() if released_files[name] == sha256}
    assert set(released_files) - same == {"index.html", "scorecard.json", "SHA256SUMS"}
    set_section(released, **QUICK, format="webdataset")
    assert "batches are reused" in released.run(TARGET)
    assert (released / "results/micro/synthetic/shard-00000.tar").is_file() and not kept.exists()


def test_a_score_that_does_not_exist_is_an_error_before_any_work(fresh: Project) -> None:
    set_section(fresh, per_class=2, require="copy.upper < 0.01")
    done = fresh.snakemake()
    assert done.returncode == 1 and "Unknown score 'copy'. Did you mean copies?" in done.stdout
    assert not (fresh / "results/datasets/dots-16/crops").exists()


ASKED = "label,count\ndark,20\nlight,10\n"
SELECTED = {
    "table": "asked.csv",
    "classifier_seeds": 2,
    "classifier_steps": 2,
    "reject": {"confidence": 0.5, "drawn": 3},
}
PART = "results/micro/synthetic_parts/part-{}-of-2.npz"


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project whose synthetic data set was drawn by one job for the rows of a table, and filtered."""
    project = make_project(tmp_path_factory.mktemp("selected") / "project")
    (project / "asked.csv").write_text(ASKED)
    set_section(project, **SELECTED)
    project.run(TARGET)
    return project


def test_selected_data_set_has_requested_counts_as_far_as_images_pass(selected: Project) -> None:
    counts = json.loads((selected / TARGET / "scorecard.json").read_text())["images"]
    assert {name: of_class["drawn"] for name, of_class in counts.items()} == {"dark": 60, "light": 30}
    rejected = sum(of_class["confidence"] for of_class in counts.values())
    assert 0 < rejected < 90
    lines = (selected / TARGET / "images/metadata.csv").read_text().splitlines()[1:]
    for name, wanted in (("dark", 20), ("light", 10)):
        of_class = counts[name]
        assert of_class["kept"] == min(wanted, of_class["drawn"] - of_class["rejected"])
        assert sum(f",{name}," in line for line in lines) == of_class["kept"]
        assert of_class["kept"] + of_class["rejected"] + of_class["not_needed"] == of_class["drawn"]
    assert len({line.split(",")[2] for line in lines}) == len(lines)  # one seed each


def test_two_killed_jobs_resume_and_equal_one_job(selected: Project) -> None:
    before = files_of(selected / TARGET)
    set_section(selected, **SELECTED, num_jobs=2)
    assert re.search(r"^synthesize_part +2$", selected.snakemake("--dry-run", TARGET).stdout, re.MULTILINE)
    halfway = selected / "results/micro/synthetic_parts/.part-1-of-2.npz.halfway"
    with started(selected, PART.format(1)) as running:
        while not list(halfway.glob("*/*.npz")) and not list(halfway.glob("*.npz")):
            assert running.poll() is None, "ended before anything was made"
            time.sleep(0.005)
        signal_jobs(running, selected.folder)
    halfway = selected / "results/micro/.synthetic.halfway"
    with started(selected, TARGET) as running:
        while not list(halfway.rglob("*.npz")):
            assert running.poll() is None, "ended before anything was made"
            time.sleep(0.005)
        signal_jobs(running, selected.folder)
    selected.run(TARGET)
    after = files_of(selected / TARGET)
    assert after == before
    assert not list((selected / "results/micro/synthetic_parts").glob("*.npz"))
    assert selected.planned(TARGET) == set()


def test_unknown_class_in_table_is_an_error_before_any_image(selected: Project) -> None:
    (selected / "asked.csv").write_text("label,count\ngrey,20\n")
    done = selected.snakemake(TARGET)
    assert done.returncode == 1 and "names the class 'grey'" in done.stdout
    (selected / "asked.csv").write_text(ASKED)
