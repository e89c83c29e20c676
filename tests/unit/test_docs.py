"""Documentation pages agree with the experiment files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from image_diffusion.codecs.diffusers import Diffusers
from image_diffusion.core.config.base import merged
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import load_experiment, parse_experiment
from image_diffusion.experiments.resolve import built_on
from image_diffusion.experiments.study import expand
from image_diffusion.metrics.distances.jackknife import share_estimate
from image_diffusion.systems.base import Others

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "config/experiments").glob("*.yaml"), key=lambda path: path.stem)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_cluster_page_lists_resources_of_each_experiment(path: Path) -> None:
    asked = load_experiment(path).resources
    where = f"{asked.nodes} × {asked.gpus_per_node}" if asked.gpus_per_node else "on CPUs"
    processes = asked.nodes * asked.processes_per_node
    size, time = f"{asked.memory_mb // 1000} GB", f"{asked.runtime_min // 60} h"
    row = f"| `{path.stem}` | {where} | {processes} | {processes * asked.cpus_per_process} | {size} | {time} |"
    assert row in (ROOT / "docs/cluster.md").read_text().splitlines(), row


def test_experiments_page_lists_every_shipped_experiment() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    assert not [path.stem for path in EXPERIMENTS if f"`{path.stem}`" not in page]


def shown(page: str) -> list[dict[str, Any]]:
    """The YAML blocks of a page."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]


def check(written: dict[str, Any], page: str) -> None:
    """Parse an experiment; check it if it needs neither another experiment nor weights from the Hub."""
    experiment = parse_experiment(written, page)
    if not built_on(experiment) and not isinstance(experiment.codec, Diffusers):
        check_experiment(experiment, Others())


PAGES = ["README.md", "config/README.md", *(f"docs/{name}.md" for name in ("text", "prior", "conditions", "tokens"))]


@pytest.mark.parametrize("page", [*PAGES, "docs/cascade.md", "docs/data.md"])
def test_complete_experiments_in_pages_are_valid(page: str) -> None:
    whole = [block for block in shown(page) if {"data", "system"} <= block.keys()]
    assert whole
    for experiment in whole:
        check(experiment, page)


@pytest.mark.parametrize("page", ["docs/synthesizing.md", "docs/arrays.md"])
def test_sections_in_pages_are_valid_in_an_experiment(page: str) -> None:
    written = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text()) | {"codec": {"type": "rgb"}}
    for sections in shown(page):
        check(merged(written, sections), page)


@pytest.mark.parametrize("joined", [1, 2])
def test_guidance_scales_in_the_conditions_page_are_valid(joined: int) -> None:
    """On their own, and merged with the block of pairs above."""
    whole, *_, pairs, scales = shown("docs/conditions.md")
    assert len(pairs["pairs"]) == 3 and "scales" in scales["sample"]["guidance"]
    written = {"data": whole["data"], "train": whole["train"]}
    for block in [pairs, scales][-joined:]:
        written = merged(written, block)
    check(written, "docs/conditions.md")


def table_of(cell: dict[str, Any]) -> dict[str, list[float]]:
    """The rows of a table under a notebook's cell, by name."""
    _, *rows = "".join(cell["outputs"][0]["data"]["text/plain"]).splitlines()
    return {name: [float(value) for value in values] for name, *values in map(str.split, rows)}


def test_tutorial_and_notebook_show_the_same_results() -> None:
    cells = json.loads((ROOT / "docs/notebooks/read.ipynb").read_text())["cells"]
    values, intervals = (
        table_of(next(cell for cell in cells if last_line in "".join(cell["source"])))
        for last_line in ('table[["value"', "pandas.DataFrame(intervals")
    )
    for name in ("inpipe_agreement", "copies", "inpipe_copies"):
        of_300 = share_estimate(torch.arange(300) < round(300 * values[name][0])).interval
        assert intervals[name] == [round(end, 3) for end in of_300 or ()], name
    page = " ".join((ROOT / "docs/tutorial.md").read_text().split())
    (agreement, _, _), (low, high) = values["inpipe_agreement"], intervals["inpipe_agreement"]
    assert f"`inpipe_agreement` is {agreement:.3f}, with an interval from {low:.3f} to {high:.3f}:" in page
    fd, real, _ = values["inpipe_fd"]
    assert f"`inpipe_fd` is {fd:.3f}, while the same number of real pictures scores {real:.3f}," in page
    assert f"its accuracy is {values['inpipe_c2st'][0]:.0%}," in page.replace(" %", "%")
    assert f"`copies` is {values['copies'][0]:.0f}, with an interval up to {intervals['copies'][1]:.3f}:" in page


def test_study_in_its_page_is_valid(tmp_path: Path) -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/studies.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text := (ROOT / "config/experiments/demo_flow.yaml").read_text())
    (tmp_path / "other.yaml").write_text(text.replace("grad_clip: 1.0", "grad_clip: 0.5"))
    (tmp_path / "study.yaml").write_text(block)
    assert len(expand(tmp_path / "study.yaml", tmp_path).runs) == 9


HOW = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/how_do_i.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("lines", "name"),
    [(lines, title) for title, body in HOW for lines in re.findall(r"```yaml\n(.*?)```", body, re.DOTALL)],
)
def test_yaml_of_answers_is_valid_in_an_experiment(lines: str, name: str) -> None:
    written = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text()) | {"codec": {"type": "rgb"}}
    written |= {"resources": {}, "data": written["data"] | {"source": {"type": "folder", "path": "images"}}}
    parse_experiment(merged(written, yaml.safe_load(lines)), name)


def test_each_answer_has_yaml_or_a_link() -> None:
    assert len(HOW) >= 15
    assert not [title for title, body in HOW if "```yaml" not in body and "](" not in body]


def test_results_page_has_markers_for_the_gpu_table() -> None:
    lines = (ROOT / "tests/bench/RESULTS.md").read_text().splitlines()
    assert lines.count("<!-- bench-gpu -->") == lines.count("<!-- /bench-gpu -->") == 1
    assert lines.index("<!-- bench-gpu -->") < lines.index("<!-- /bench-gpu -->")


def test_release_notes_are_the_changelog_section(tmp_path: Path) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (step,) = [each for each in jobs["release"]["steps"] if "CHANGELOG.md" in each.get("run", "")]
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n- new\n\n## 0.1.0\n\n- old\n")
    for tag, said in (("v0.2.0", "- new"), ("v0.1.0", "- old")):
        subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env={**os.environ, "TAG": tag}, check=True)
        assert (tmp_path / "notes.md").read_text().strip() == said
    missing = subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env={**os.environ, "TAG": "v9"}, check=False)
    assert missing.returncode != 0
