"""A study by one command: its page, a second command, an added variant, and a variant that fails."""

from __future__ import annotations

import csv
import re
import sqlite3
import subprocess
from pathlib import Path

import pytest
import yaml
from browser import CHROMIUM, Browser
from projects import Project, made_once, make_project

pytestmark = pytest.mark.slow

VARIANTS = [{"name": "qk-norm", "changes": {"system.network.qk_norm": True}, "source": "arXiv:2010.04245"}]
STUDY = {
    "base": "micro",
    "seeds": [0, 1],
    "budget": {"steps": 4},
    "changes": {"train.log_every_steps": 2, "train.validate_every_steps": None, "evaluate.two_sample": False},
    "variants": VARIANTS,
}
NAMED = ("--config", "study=digits")


def write(project: Project, **changes: object) -> None:
    path = project / "config/studies/digits.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(STUDY | changes))


def jobs(project: Project) -> dict[str, int]:
    """Return the number of jobs of each rule that Snakemake would run now."""
    done = project.snakemake("--dry-run", *NAMED)
    assert done.returncode == 0, done.stdout
    counts = re.findall(r"^(\w+) +(\d+)$", done.stdout, re.MULTILINE)
    return {rule: int(count) for rule, count in counts if rule not in ("all", "total")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Project with a finished study. Tests restore what they change."""

    def make(folder: Path) -> None:
        project = make_project(folder)
        write(project)
        project.run(*NAMED)

    return Project(made_once(tmp_path_factory, "study", make))


def test_study_writes_page_and_table_and_second_run_has_nothing_to_do(kept: Project) -> None:
    folder = kept / "results/studies/digits"
    rows = list(csv.DictReader((folder / "study.csv").open()))
    assert [row["variant"] for row in rows if row["metric"] == "inpipe_agreement"] == ["base", "qk-norm"]
    assert all(float(row["operations"]) > 0 and int(float(row["steps"])) == 4 for row in rows)
    assert [row["verdict"] in ("better", "worse", "within noise") for row in rows[:2]] == [False, True]
    text = (folder / "study.md").read_text()
    assert "| qk-norm |" in text and "seeds and samples" in text and "4 steps each" in text
    page = (folder / "index.html").read_text()
    assert "system.network.qk_norm: true" in page and "arXiv:2010.04245" in page
    assert set(re.findall(r'(?:src|href)="([a-z]+)', page)) <= {"data"}
    assert kept.planned(*NAMED) == set()


def test_added_variant_or_seed_runs_its_own_jobs_only(kept: Project) -> None:
    try:
        write(kept, variants=[*VARIANTS, {"name": "swiglu", "changes": {"system.network.mlp": "swiglu"}}])
        own = {"train": 2, "sample": 2, "evaluate": 2, "study": 1, "track_study": 1}
        assert jobs(kept) == own
        write(kept, seeds=[0, 1, 2])
        assert jobs(kept) == own, "one seed more of two variants"
    finally:
        write(kept)


def test_its_runs_are_found_in_mlflow_by_their_tags(kept: Project) -> None:
    with sqlite3.connect(kept / "mlflow.db") as store:
        tags = dict[str, dict[str, str]]()
        for run, key, value in store.execute("SELECT run_uuid, key, value FROM tags"):
            tags.setdefault(run, {})[key] = value
    trained = [each for each in tags.values() if each.get("study") == "digits" and each["stage"] == "train"]
    assert sorted((each["variant"], each["seed"]) for each in trained) == [
        (variant, seed) for variant in ("base", "qk-norm") for seed in "01"
    ]
    (whole,) = [each for each in tags.values() if each.get("stage") == "study"]
    assert "| qk-norm |" in whole["mlflow.note.content"]


def test_failed_variant_is_shown_with_its_error_and_keeps_other_results(kept: Project, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    for name in ("results", "logs", ".snakemake", "benchmarks", "images"):
        subprocess.run(["cp", "--archive", "--no-target-directory", kept / name, project / name], check=True)
    wrong = {"name": "unstable", "changes": {"train.init_from": "nowhere"}}
    write(project, seeds=[0], variants=[*VARIANTS, wrong])
    done = project.snakemake("--keep-going", *NAMED)
    assert done.returncode == 1
    folder = project / "results/studies/digits"
    rows = {row["variant"]: row for row in csv.DictReader((folder / "study.csv").open())}
    assert (rows["unstable"]["failed"], rows["qk-norm"]["failed"]) == ("1", "0")
    page = (folder / "index.html").read_text()
    assert "1 of 1 failed" in page and "unstable, seed 0" in page and "nowhere" in page
    assert "over samples only, as there is one seed" in page
    assert "study" in project.planned("--keep-going", *NAMED), "and goes on"
    write(project)
    assert project.planned(*NAMED) == {"study", "track_study"}, "without the variant: the page of before, made again"


@pytest.mark.parametrize(
    ("study", "changes", "line"),
    [
        ("study=dgits", {}, "error: config/studies/dgits.yaml does not exist. Did you mean digits?"),
        ("ledger=digits", {}, "error: config/config.yaml: ledger is called study now."),
        ("study=digits", {"base": "mirco"}, "error: config/studies/digits.yaml: base is mirco, but "),
    ],
)
def test_a_mistake_is_one_line_before_any_work(fresh: Project, study: str, changes: dict[str, str], line: str) -> None:
    write(fresh, **changes)
    done = fresh.snakemake("--config", study)
    beside = ("Config file", "Using workflow specific profile")
    lines = [each for each in done.stdout.strip().splitlines() if not each.startswith(beside)]
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith(line)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_is_shown_without_a_network(kept: Project, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "chromium")
    try:
        browser.cut_off()
        browser.open((kept / "results/studies/digits/index.html").as_uri())
        browser.wait_for("Study digits", "qk-norm", "within noise")
        assert browser.complaints == []
    finally:
        browser.close()
