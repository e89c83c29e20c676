"""The start of the workflow, tested without Snakemake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from image_diffusion.core.files.atomic import read_json, write_json, write_text
from image_diffusion.workflow.code_digest import note_code
from image_diffusion.workflow.environment import search_path, with_package
from image_diffusion.workflow.jobs.live_tracking import LOG, Following
from image_diffusion.workflow.parts import look_at_sources
from image_diffusion.workflow.start import start
from plans import a_plan, a_set, plans_of, write_plans

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"experiments": ["one"], "results": "results", "tracking": {"uri": "sqlite:///mlflow.db", "project": "x"}}
CODE = dict.fromkeys(("crop", "encode", "embed", "train", "pages"), "new")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of Snakemake, with 8 images."""
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        write_text(Path("images", f"{number}.png"), str(number))
    return tmp_path


def test_nothing_heavy_is_imported() -> None:
    source = ROOT / "src"
    paths = (source / "image_diffusion/workflow").rglob("*.py")
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path in paths]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules}];"
        "print({'torch', 'numpy', 'PIL', 'mlflow', 'jsonschema'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_changed_files_of_a_source_are_noted(folder: Path) -> None:
    plans = plans_of(a_plan())
    look_at_sources(plans, Path("results"), trust_ctime=True)
    note = Path("results/datasets/dots-16/source.json")
    before = read_json(note)
    assert before["files"] == 8
    write_text(Path("images/9.png"), "9")
    look_at_sources(plans, Path("results"), trust_ctime=True)
    assert read_json(note)["revision"] != before["revision"]


def test_fewer_images_than_a_batch_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="images holds 8 files, fewer than one batch of train.global_batch = 9"):
        look_at_sources(plans_of(a_plan(global_batch=9)), Path("results"), trust_ctime=True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"source": {"type": "folder", "path": "."}}, "data.source.path: ."),
        ({"pairs": {"image-images": a_set(files="../.")}}, "pairs.path: ../."),
    ],
)
def test_results_inside_the_images_are_refused(folder: Path, changes: dict[str, Any], key: str) -> None:
    message = f"dots-16: {key} contains the folder of results results, whose pictures would become images. Move "
    with pytest.raises(ValueError, match=re.escape(message)):
        look_at_sources(plans_of(a_plan(**changes)), Path("results"), trust_ctime=True)
    assert not Path("results").exists()


@pytest.mark.parametrize("results", ["images/.project/results", "images-2", "."])
def test_results_outside_the_images_are_accepted(folder: Path, results: str) -> None:
    look_at_sources(plans_of(a_plan()), Path(results), trust_ctime=True)


def test_changed_code_of_existing_results_is_reported(folder: Path) -> None:
    plans, results = plans_of(a_plan(codec="vae", configs={"crop": "c", "encode": "e", "train": "t"})), Path("results")
    assert note_code(plans, results, CODE) == []
    notes = [Path("results", *parts, "config") for parts in (["one"], ["datasets", "dots-16"])]
    assert [path.name for note in notes for path in sorted(note.iterdir())] == [
        "train.code",
        "crop.code",
        "encode-vae.code",
    ]
    assert note_code(plans, results, CODE | {"train": "newer"}) == []  # no result exists yet
    write_text(results / "one/train/weights.safetensors", "")
    told = note_code(plans, results, CODE)
    assert told == ["The code of train has changed since. To make it again: rm -r results/one/train"]
    assert note_code(plans, results, CODE | {"train": "newer"}) == []
    note = results / "one/config/train.code"
    note.write_bytes(note.read_bytes().replace(b"newer", b"never"))
    was_damaged = f"{note} was damaged: whether the code of train has changed before now is not known."
    assert note_code(plans, results, CODE | {"train": "newer"}) == [was_damaged]
    assert note_code(plans, results, CODE | {"train": "newer"}) == []


def test_remade_results_count_as_made_with_the_current_code(folder: Path) -> None:
    plans, results = plans_of(a_plan(configs={"train": "t"})), Path("results")
    weights, newer = results / "one/train/weights.safetensors", CODE | {"train": "newer"}
    changed = ["The code of train has changed since. To make it again: rm -r results/one/train"]
    note_code(plans, results, CODE)
    write_text(weights, "")
    assert note_code(plans, results, newer) == changed == note_code(plans, results, newer)
    later = (results / "one/config/train.code").stat().st_mtime + 1
    os.utime(weights, (later, later))  # remade after a change of its data
    assert note_code(plans, results, newer) == []
    assert note_code(plans, results, CODE) == changed
    write_json(results / "one/config/train.code", {"code": "of an earlier version's note"})
    assert note_code(plans, results, CODE) == changed


def test_code_of_embed_is_recorded_per_set_of_pairs(folder: Path) -> None:
    plans, results = plans_of(a_plan(configs={"embed-clip": "e", "embed-text-large": "e"})), Path("results")
    assert note_code(plans, results, CODE) == []
    notes = sorted(path.name for path in (results / "datasets/dots-16/config").iterdir())
    assert notes == ["embed-clip.code", "embed-text-large.code"]
    write_text(results / "datasets/dots-16/text-large/manifest.json", "{}")
    assert note_code(plans, results, CODE | {"embed": "newer"}) == [
        "The code of embed has changed since. To make it again: rm -r results/datasets/dots-16/text-large"
    ]


def test_stages_find_python_scripts_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    once = search_path(Path("/w"), "/usr/bin:/bin")
    assert once.split(":") == [str(Path(sys.executable).parent), "/w/workflow/scripts", "/usr/bin", "/bin"]
    assert search_path(Path("/w"), once) == once
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert with_package(Path("/w/src"))["PYTHONPATH"] == "/w/src:/mine"
    monkeypatch.delenv("PYTHONPATH")
    assert with_package(Path("/w/src"))["PYTHONPATH"] == "/w/src"


def test_stages_log_and_import_the_package_of_the_workflow(folder: Path) -> None:
    code = "import image_diffusion, os, sys; print(image_diffusion.__file__, os.environ['IMAGE_DIFFUSION_STAGE'])"
    code += "; sys.exit(3)"
    logged = [ROOT / "workflow/scripts/logged", "logs/a b/x.log", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(logged, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3
    assert done.stdout == Path("logs/a b/x.log").read_text() == f"{ROOT / 'src/image_diffusion/__init__.py'} a b/x\n"


def test_remote_jobs_read_plans_without_scanning_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    write_plans(Path("results"), a_plan("another"), a_plan())
    write_json(Path("results/of_before/config/plan.json"), {"experiment": "of_before"})
    write_json(
        Path("results/.resolved.json"), {"code": {"train": "x", "pages": "y"}, "experiments": ["one"], "studies": []}
    )
    known = start(ROOT, CONFIG, queued=True, remote=True)
    assert (known.results, dict(known.code), list(known.plans.by_name)) == (
        "results",
        {"train": "x", "pages": "y"},
        ["another", "one"],  # `another` may be from an earlier request
    )
    assert len(known.pages) == 64
    assert not Path("results/datasets").exists()
    assert os.environ["PATH"].endswith(":/bin")


def test_a_mistake_ends_snakemake_with_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    with pytest.raises(SystemExit) as caught:
        start(ROOT, CONFIG, queued=False, remote=False)
    assert caught.value.code == "error: config/experiments/one.yaml does not exist."
    with pytest.raises(SystemExit, match="error: The module has a prefix"):
        start(ROOT, CONFIG, queued=False, remote=False, moved="moved/{}".format)


@pytest.mark.parametrize(("argument", "looks"), [("--list-rules", False), ("--lint", False), ("--dry-run", True)])
def test_listing_rules_does_not_scan_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argument: str, looks: bool
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr("image_diffusion.workflow.start.resolve", lambda *_: CODE)
    write_plans(Path("results"), a_plan())
    start(ROOT, CONFIG, queued=False, remote=False, arguments=[argument])
    assert Path("results/datasets/dots-16/source.json").exists() == looks


@pytest.mark.parametrize("written", ["results/", "./results", "results"])
def test_results_path_is_normalised(folder: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr("image_diffusion.workflow.start.resolve", lambda *_: CODE)
    write_plans(Path("results"), a_plan())
    context = start(ROOT, CONFIG | {"results": written}, queued=False, remote=False)
    assert context.results == context.files.results == "results"


def test_follower_runs_if_configured_and_ends_with_snakemake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = "import sys; print(sys.argv[1:], flush=True); sys.stdin.read()"
    write_text(folder / "src/image_diffusion/__init__.py", "")
    write_text(folder / "src/image_diffusion/__main__.py", stand_in)
    quiet = Following({"every_s": None, "uri": "u", "project": "p"}, folder / "src", "results", ["one"])
    quiet.start()
    quiet.end()
    assert not LOG.exists()
    following = Following({"every_s": 5, "uri": "u", "project": "p"}, folder / "src", "results", ["one"])
    following.start()
    process = following.process
    assert process is not None and process.poll() is None
    second = Following(following.tracking, following.source, "results", ["one"])  # as of a second Snakemake
    second.start()
    second.end()
    assert second.process is None and process.poll() is None
    following.end()
    assert process.poll() is not None
    asked = ["track", "--results", "results", "--every", "5", "--project", "p", "--follow", "one"]
    assert str(asked) in LOG.read_text()
    assert capsys.readouterr().err == ""
    following.start()
    write_text(folder / "src/image_diffusion/__main__.py", "raise SystemExit(1)")
    following.end()
    assert capsys.readouterr().err.startswith("warning: MLflow did not take everything yet, as logs/follow.log says")
