"""Experiments are resolved to plans only if something has changed."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.files.atomic import write_text
from image_diffusion.workflow import resolve as module
from image_diffusion.workflow.plans import STAGES
from image_diffusion.workflow.resolve import configure, requested, resolve, resolved
from plans import a_plan, write_plans

SCHEMA = Path(__file__).resolve().parents[2] / "workflow" / "schemas" / "config.schema.json"
CONFIG = {"experiments": ["one"], "results": "results", "tracking": {"uri": "sqlite:///mlflow.db", "project": "x"}}


class Place:
    """A folder with one experiment, a minimal workflow, and a list of the steps that ran."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.done = folder / "workflow", list[str]()
        (folder / "mine").mkdir()
        monkeypatch.chdir(folder / "mine")
        for stage in (*STAGES, "datasheet", "detect", "reference", "sweep", "ema", "track"):
            write_text(self.root / "src" / "image_diffusion" / "stages" / f"{stage}.py", f"name = '{stage}'")
        (self.root / "workflow" / "schemas").mkdir(parents=True)
        shutil.copy(SCHEMA, self.root / "workflow" / "schemas")
        write_text(Path("config/experiments/one.yaml"), "a: 1")
        write_text(Path("config/experiments/unrelated.yaml"), "a: 1")
        write_text(Path("rows.csv"), "image")

        def configure(experiments: list[Path], results: Path, source: Path, studies: list[Path]) -> None:
            self.done.append("configure")
            points = {"guidance_scale": {"1": "results/one/config/sweep/guidance_scale-1.yaml"}}
            plan = a_plan("one", sweep=points, prompts="rows.csv", synthesize_table="images.csv")
            for path in (*plan.configs.values(), *plan.references.values(), *plan.sweep["guidance_scale"].values()):
                write_text(Path(path), Path("config/experiments/one.yaml").read_text())
            write_text(Path("results/one/config/sweep/evaluate.yaml"), "a: 1")
            write_plans(results, plan)

        monkeypatch.setattr(module, "configure", configure)
        digests, checks = module.stage_digests, module.check_settings
        monkeypatch.setattr(module, "stage_digests", lambda source: (self.done.append("digest"), digests(source))[1])
        monkeypatch.setattr(module, "check_settings", lambda *given: (self.done.append("check"), checks(*given))[1])

    def does(self, **changes: Any) -> set[str]:
        """Run `resolve` and return the steps that it took."""
        self.done.clear()
        resolve(self.root, CONFIG | changes)
        return set(self.done)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path, monkeypatch)
    assert place.does() == {"check", "digest", "configure"}
    return place


def test_second_resolve_does_nothing(place: Place) -> None:
    before = Path("results/.resolved.json").stat().st_mtime_ns
    assert place.does() == set()
    assert Path("results/.resolved.json").stat().st_mtime_ns == before


CHANGES: dict[str, Callable[[Place], object]] = {
    "the experiment": lambda place: Path("config/experiments/one.yaml").write_text("a: 2"),
    "a configuration, by hand": lambda place: Path("results/one/config/train.yaml").write_text("a: 9"),
    "a lost configuration": lambda place: Path("results/datasets/dots-16/config/crop.yaml").unlink(),
    "a lost point of a curve": lambda place: Path("results/one/config/sweep/guidance_scale-1.yaml").unlink(),
    "how a curve is judged": lambda place: Path("results/one/config/sweep/evaluate.yaml").write_text("a: 9"),
    "how a reference is made": lambda place: Path("results/datasets/dots-16/config/reference-inpipe.yaml").write_text(
        "a: 9"
    ),
    "the table of what is sampled": lambda place: Path("rows.csv").write_text("mask"),
    "a truncated plan": lambda place: Path("results/one/config/plan.json").write_text("{"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_or_damaged_files_are_configured_again(place: Place, what: str) -> None:
    written = sorted(path for path in Path("results/one").rglob("*") if path.is_file())
    CHANGES[what](place)
    assert place.does() == {"configure"}
    assert sorted(path for path in Path("results/one").rglob("*") if path.is_file()) == written
    assert place.does() == set()


def test_future_times_matter_only_for_written_files(place: Place) -> None:
    os.utime("rows.csv", (2e10, 2e10))
    os.utime("config/experiments/one.yaml", (2e10, 2e10))
    assert place.does() == set()
    os.utime("results/one/config/train.yaml", (2e10, 2e10))
    assert place.does() == {"configure"}


def test_unrequested_experiments_are_ignored(place: Place) -> None:
    Path("config/experiments/unrelated.yaml").write_text("a: 2")
    assert place.does() == set()


def test_settings_unused_by_experiments_are_only_checked(place: Place) -> None:
    assert place.does(nodes=2) == {"check"}
    assert place.does(results="elsewhere") == {"check", "digest", "configure"}


def test_changed_code_is_resolved_again(place: Place) -> None:
    code = resolve(place.root, CONFIG)
    (place.root / "src/image_diffusion/stages/train.py").write_text("name = 'other'")
    assert place.does() == {"digest", "configure"}
    now = resolve(place.root, CONFIG)
    assert [stage for stage in code if code[stage] != now[stage]] == ["train"]


def test_moved_workflow_is_not_resolved_again(place: Place) -> None:
    place.root = place.root.rename(place.root.with_name("moved"))
    assert place.does() == set()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"config": 1', "null"])
def test_damaged_cache_is_ignored(place: Place, text: str) -> None:
    before = Path("results/.resolved.json").read_bytes()
    Path("results/.resolved.json").write_text(text)
    assert place.does() == {"check", "digest", "configure"}
    assert Path("results/.resolved.json").read_bytes() == before


def test_remote_jobs_read_the_resolved_cache(place: Place) -> None:
    code = resolve(place.root, CONFIG)
    assert resolved(Path("results")) == (code, {"experiments": ["one"], "study": []})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"results": ["a"]}, "config/config.yaml: results: ['a'] is not of type 'string'."),
        ({"results": datetime.date(2026, 1, 2)}, "config/config.yaml: results: "),
        ({"experiments": ["on"]}, "config/experiments/on.yaml does not exist. Did you mean one?"),
    ],
)
def test_a_mistake_in_the_settings_is_one_line_before_any_work(
    place: Place, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError) as caught:
        place.does(**changes)
    assert str(caught.value).startswith(line)
    assert "configure" not in place.done


def test_an_edited_base_is_configured_again(place: Place) -> None:
    write_text(Path("config/experiments/one.yaml"), "base: unrelated")
    assert place.does() == {"configure"}
    assert place.does() == set()
    write_text(Path("config/experiments/unrelated.yaml"), "a: 2")
    assert place.does() == {"configure"}


@pytest.mark.parametrize(
    ("arguments", "listed", "found"),
    [
        ([], ["one"], ["one"]),
        ([], "one", ["one"]),
        (["--cores", "all", "unrelated"], ["one"], ["unrelated"]),
        (["unrelated", "--cores", "2", "one", "unrelated"], ["other"], ["unrelated", "one"]),
        (["--config", "experiments=unrelated", "../one", "train", "results/absent/x", "results/one"], ["one"], ["one"]),
        (["results/unrelated/metrics.json", "./results/one/metrics.json"], ["one"], ["one", "unrelated"]),
        (["results/one/metrics.json", "unrelated"], ["other"], ["unrelated", "one"]),
        (["results/one/metrics.json"], {"wrong": 1}, {"wrong": 1}),
        ([], None, None),
    ],
)
def test_experiments_of_the_command_line_override_the_setting(
    place: Place, arguments: list[str], listed: Any, found: Any
) -> None:
    assert requested({"experiments": listed}, arguments) == {"experiments": found, "study": []}


def test_errors_of_configure_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        module.configure([Path("config/experiments/x.yaml")], Path("results"), SCHEMA.parents[2] / "src")
    assert str(caught.value) == "config/experiments/x.yaml does not exist."


def test_warnings_of_configure_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.CompletedProcess([], 0, "", "warning: one\nnoise of a library\nwarning: two\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    configure([], tmp_path, tmp_path)
    assert capsys.readouterr().err == "warning: one\nwarning: two\n"
