"""The page of `make peers`: ratios, order, and measurements of this project's variants, without the peers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "tests" / "bench" / "peers"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts import each other and the modules of tests/bench."""
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.syspath_prepend(str(PEERS.parent))


def loaded(name: str) -> ModuleType:
    """Import a script of tests/bench/peers."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = loaded("run")


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of a table, without its header."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_ratios_are_taken_per_round_and_better_peers_come_first() -> None:
    measures = {"rate": run.Measure("Rate", is_rate=True), "other_s": run.Measure("Other (s)", "{:.1f}")}
    table = run.Table("Things", "What is compared.", "none", {"slow": "a note", "fast": ""}, measures)
    found = {
        "ours": [{"rate": 10.0, "other_s": 1.0}, {"rate": 20.0, "other_s": 1.0}, {"rate": 10.0, "other_s": 1.0}],
        "slow": [{"rate": 5.0, "other_s": None}, {"rate": 10.0, "other_s": None}, {"rate": 2.0, "other_s": None}],
        "fast": [{"rate": 40.0, "other_s": 2.0}, {"rate": 40.0, "other_s": 2.5}, {"rate": 20.0, "other_s": 3.0}],
    }
    rows = rows_of(run.rendered(table, found))
    assert rows[0] == ["fast", "40", "2.5", "**0.50** (0.25 to 0.50)"]
    assert rows[1] == ["**image-diffusion**", "10", "1.0", "1"]
    assert rows[2] == ["slow: a note", "5", "–", "**2.00** (2.00 to 5.00)"]


def test_fewer_seconds_are_better() -> None:
    table = run.Table("Things", "What is compared.", "none", {"slow": ""}, {"cpu_s": run.Measure("CPU s")})
    found = {"ours": [{"cpu_s": 2.0}], "slow": [{"cpu_s": 3.0}]}
    assert rows_of(run.rendered(table, found))[1][-1] == "**1.50** (1.50 to 1.50)"


def test_failing_variant_stops_the_run_and_shows_its_output(tmp_path: Path) -> None:
    table = run.Table("Things", "Text.", "judging", {}, {"cpu_s": run.Measure("CPU s")}, ("nobody",))
    with pytest.raises(SystemExit, match=r"error: ours failed at Things:[\s\S]*KeyError: 'nobody'"):
        run.run_once(table, "ours", tmp_path)


def test_the_page_names_the_locked_version_of_every_peer() -> None:
    names = re.findall(r"^[\w-]+", (ROOT / "envs" / "peers.in").read_text(), re.MULTILINE)
    assert sorted(part.split()[0] for part in run.versions().split(", ")) == sorted(names)
    listed = {peer.split("[")[0] for table in run.TABLES for peer in table.peers}
    assert listed - {"mosaic"} <= set(names)


def test_the_page_of_the_repository_has_every_table_and_peer() -> None:
    text = (ROOT / "docs" / "peers.md").read_text()
    for table in run.TABLES:
        part = text.split(f"## {table.title}\n")[1].split("\n## ")[0]
        heads = [row[0].split(":")[0].strip("*") for row in rows_of(part)]
        assert sorted(heads) == sorted(["image-diffusion", *table.peers])


def test_the_readme_has_the_best_peer_of_each_table() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    best = []
    for title, part in re.findall(r"^## (.*)\n([\s\S]*?)(?=^## |\Z)", page, re.MULTILINE):
        rows = [(row[0].split(":")[0], row[-1].split("**")[1]) for row in rows_of(part) if row[-1] != "1"]
        best.append([title, *min(rows, key=lambda row: float(row[1]))])
    readme = (ROOT / "README.md").read_text().split("## Beside other projects\n")[1].split("\n## ")[0]
    assert rows_of(readme) == best
    date = re.search(r"by `make peers` on (.*?):", page)
    assert date is not None and date[1] in " ".join(readme.split())


def test_each_round_of_whole_trainings_is_one_seed_without_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.py").write_text("import json, sys; print(json.dumps({'cpu_s': float(sys.argv[-1])}))")
    monkeypatch.setattr(run, "HERE", tmp_path)
    table = run.Table("Things", "Text.", "whole", {"other": ""}, {"cpu_s": run.Measure("CPU s")}, by_seed=True)
    found = run.measured(table, 3, tmp_path)
    assert [row["cpu_s"] for row in found["ours"]] == [row["cpu_s"] for row in found["other"]] == [0, 1, 2]


def test_peer_sees_every_image_each_epoch_with_a_network_of_the_same_size() -> None:
    recipes = loaded("recipes")
    pixels = torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 1, 2)
    batch = recipes.Images(pixels, False, 1000).batches(5)
    assert sorted(torch.cat([batch(), batch()])[:, 0, 0, 0].tolist()) == list(range(10))
    assert recipes.Images(pixels, False, 1000).narrowed(lambda divisor: nn.Linear(64 // divisor, 64)).in_features == 16
    mirrored = recipes.Images(pixels + torch.tensor([0.0, 0.5]), True, 0).batches(1000)()
    assert 0.4 < (mirrored[..., 0] > mirrored[..., 1]).double().mean() < 0.6


@pytest.mark.slow
def test_readers_yield_every_sample_once_and_resume_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = loaded("loading")
    monkeypatch.setattr(loading, "COUNT", {"latents": 600, "photographs": 40})
    monkeypatch.setattr(loading, "BATCH", {"latents": 100, "photographs": 8})
    for kind in ("latents", "photographs"):
        found = loading.measure(kind, "ours", tmp_path)
        assert found["epoch"] > 0 and found["resumed_s"] > 0
        assert (found["first_epoch"] < found["epoch"]) is (kind == "photographs")
    reader = loading.ours("latents")
    batches, state = reader.open(tmp_path / "latents-ours", None)
    labels = [next(batches)[1].tolist() for _ in range(3)]
    rest, _ = reader.open(tmp_path / "latents-ours", state())
    labels += [part.tolist() for _, part in rest]
    assert sorted(label for part in labels for label in part) == list(range(600))


def test_reference_distance_of_the_judging_comparison_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    judging = loaded("judging")
    monkeypatch.setattr(judging, "DIMENSION", 32)
    monkeypatch.setattr(judging, "COUNTS", (400, 300))
    first, second, truth = judging.features()
    assert judging.ours()(first, second) == pytest.approx(truth, rel=1e-11)


@pytest.mark.slow
def test_a_training_step_is_measured(tmp_path: Path) -> None:
    table = next(table for table in run.TABLES if table.script == "training")
    assert run.run_once(table, "ours", tmp_path)["step_ms"] > 0


def test_planning_graph_of_the_peers_matches_the_demo(tmp_path: Path) -> None:
    planning = loaded("planning")
    shutil.copytree(ROOT / "config", tmp_path / "config")
    line = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1", "--dag"]
    line += ["--config", "experiments=[demo]"]
    drawn = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    rules = re.findall(r'label = "(\w+)', drawn.stdout)
    assert sorted(job.removeprefix("codec_") for job in planning.GRAPH) == sorted(rules)
    assert sum(len(needed) for needed in planning.GRAPH.values()) == drawn.stdout.count(" -> ")
    made: set[str] = set()
    for job, needed in planning.GRAPH.items():
        assert made.issuperset(needed)
        made.add(job)
