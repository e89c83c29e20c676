"""What the documents say of the experiments is what their files say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_diffusion.codecs.diffusers import Diffusers
from image_diffusion.core.config.base import merged
from image_diffusion.experiments.checks import check_experiment
from image_diffusion.experiments.experiment import load_experiment, parse_experiment
from image_diffusion.experiments.resolve import built_on
from image_diffusion.systems.base import Others

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "config/experiments").glob("*.yaml"), key=lambda path: path.stem)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_page_for_clusters_tells_what_an_experiment_asks_for(path: Path) -> None:
    asked = load_experiment(path).resources
    where = f"{asked.nodes} × {asked.gpus_per_node}" if asked.gpus_per_node else "on CPUs"
    processes = asked.nodes * asked.processes_per_node
    size, time = f"{asked.memory_mb // 1000} GB", f"{asked.runtime_min // 60} h"
    row = f"| `{path.stem}` | {where} | {processes} | {processes * asked.cpus_per_process} | {size} | {time} |"
    assert row in (ROOT / "docs/cluster.md").read_text().splitlines(), row


def test_the_page_of_experiments_lists_every_one() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    assert not [path.stem for path in EXPERIMENTS if f"`{path.stem}`" not in page]


def shown(page: str) -> list[dict[str, Any]]:
    """The blocks of YAML of a page."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]


def check(written: dict[str, Any], page: str) -> None:
    """Parse an experiment, and check it if it needs neither another experiment nor weights of the Hub."""
    experiment = parse_experiment(written, page)
    if not built_on(experiment) and not isinstance(experiment.codec, Diffusers):
        check_experiment(experiment, Others())


PAGES = ["README.md", "config/README.md", *(f"docs/{name}.md" for name in ("text", "prior", "conditions", "tokens"))]


@pytest.mark.parametrize("page", [*PAGES, "docs/cascade.md", "docs/data.md"])
def test_a_whole_experiment_that_is_shown_is_one(page: str) -> None:
    whole = [block for block in shown(page) if {"data", "system"} <= block.keys()]
    assert whole
    for experiment in whole:
        check(experiment, page)


@pytest.mark.parametrize("page", ["docs/synthesizing.md", "docs/arrays.md"])
def test_sections_that_are_shown_fit_an_experiment(page: str) -> None:
    written = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text()) | {"codec": {"type": "rgb"}}
    for sections in shown(page):
        check(merged(written, sections), page)


@pytest.mark.parametrize("joined", [1, 2])
def test_scales_of_the_parts_of_a_condition_are_an_experiment(joined: int) -> None:
    """Alone, and joined with the block of pairs above."""
    whole, *_, pairs, scales = shown("docs/conditions.md")
    assert len(pairs["pairs"]) == 3 and "scales" in scales["sample"]["guidance"]
    written = {"data": whole["data"], "train": whole["train"]}
    for block in [pairs, scales][-joined:]:
        written = merged(written, block)
    check(written, "docs/conditions.md")


HOW = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/how_do_i.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("lines", "name"),
    [(lines, title) for title, body in HOW for lines in re.findall(r"```yaml\n(.*?)```", body, re.DOTALL)],
)
def test_lines_of_an_answer_fit_an_experiment(lines: str, name: str) -> None:
    written = yaml.safe_load((ROOT / "config/experiments/demo.yaml").read_text()) | {"codec": {"type": "rgb"}}
    written |= {"resources": {}, "data": written["data"] | {"source": {"type": "folder", "path": "images"}}}
    parse_experiment(merged(written, yaml.safe_load(lines)), name)


def test_each_answer_has_lines_or_leads_to_a_page() -> None:
    assert len(HOW) >= 15
    assert not [title for title, body in HOW if "```yaml" not in body and "](" not in body]


def test_the_page_of_results_has_a_place_for_the_table_of_a_gpu() -> None:
    lines = (ROOT / "tests/bench/RESULTS.md").read_text().splitlines()
    assert lines.count("<!-- bench-gpu -->") == lines.count("<!-- /bench-gpu -->") == 1
    assert lines.index("<!-- bench-gpu -->") < lines.index("<!-- /bench-gpu -->")


def test_the_notes_of_a_release_are_what_the_changelog_says_of_it(tmp_path: Path) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (step,) = [each for each in jobs["release"]["steps"] if "CHANGELOG.md" in each.get("run", "")]
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n- new\n\n## 0.1.0\n\n- old\n")
    for tag, said in (("v0.2.0", "- new"), ("v0.1.0", "- old")):
        subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env={**os.environ, "TAG": tag}, check=True)
        assert (tmp_path / "notes.md").read_text().strip() == said
    missing = subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env={**os.environ, "TAG": "v9"}, check=False)
    assert missing.returncode != 0
