"""The documentation's notebooks run on a project of a few images; its picture of the rules is Snakemake's graph."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from notebooks import executed
from projects import ROOT, Project, make_project

pytestmark = pytest.mark.slow

RUN = "run: python tests/workflow/notebooks.py NOTEBOOK FOLDER"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
GRAPH = ROOT / "docs" / "images" / "rules.svg"
STYLE = """digraph rules {
bgcolor=transparent;
node [shape=box, style="rounded,filled", fillcolor="#eef3fa", color="#4a6fa5", fontname="sans-serif", fontsize=12];
edge [color="#8a94a3"];
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_with_committed_kinds_of_outputs(made: Project, path: Path, tmp_path: Path) -> None:
    for here, there in {"shapes": "micro", "datasets/shapes-32": "datasets/dots-16"}.items():
        (tmp_path / "results" / here).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "results" / here).symlink_to(made / "results" / there)
    committed = json.loads(path.read_text())["cells"]
    made_now = executed(path, tmp_path, {"STEPS = 1000": "STEPS = 12"})
    for before, now in zip(committed, made_now["cells"], strict=True):
        kinds = [[each["output_type"] for each in cell.get("outputs", [])] for cell in (before, now)]
        assert kinds[0] == kinds[1], RUN
        if 'table[["value"' in "".join(before["source"]):
            names = [[row.split()[0] for row in each["outputs"][0]["data"]["text/plain"][1:]] for each in (before, now)]
            assert names[0] == names[1], RUN


def test_picture_of_rules_matches_snakemake_rulegraph(tmp_path: Path) -> None:
    done = subprocess.run(
        [*make_project(tmp_path / "project").command(), "--config", "experiments=[demo]", "--rulegraph"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', done))
    edges = {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", done)}
    edges = {(a, b) for a, b in edges if b != "all"}
    if os.environ.get("IMAGE_DIFFUSION_WRITE"):  # needs graphviz
        dot = STYLE + "".join(f"{a} -> {b};\n" for a, b in sorted(edges)) + "}\n"
        subprocess.run(["dot", "-Tsvg", "-o", GRAPH], input=dot, text=True, check=True)
    titles = map(html.unescape, re.findall(r"<title>(.*?)</title>", GRAPH.read_text()))
    drawn = {tuple(title.split("->")) for title in titles if "->" in title}
    assert drawn == edges, "run: IMAGE_DIFFUSION_WRITE=1 pytest tests/workflow/test_workflow_docs.py"
