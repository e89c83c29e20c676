"""The page of an experiment: everything in one file, the same bytes for the same results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT, Project

pytestmark = pytest.mark.xdist_group("workflow")

PAGE = "results/micro/report/index.html"


def test_the_page_needs_no_other_file(made: Project) -> None:
    page = (made / PAGE).read_text()
    assert set(re.findall(r'(?:src|href)="([a-z]+)', page)) <= {"data"}


def test_the_page_shows_what_was_found(made: Project) -> None:
    page = (made / PAGE).read_text()
    for shown in ["<h1>micro</h1>", "Samples", "inpipe_fd", "train/loss", "num_samples", "global_batch"]:
        assert shown in page, shown


def test_the_same_results_give_the_same_page(made: Project, tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "workflow/scripts/report.py"]
    folders = ["--experiment", "results/micro", "--data", "results/datasets/dots-16/crops"]
    subprocess.run([*script, *folders, "--output", tmp_path / "page.html"], cwd=made.folder, check=True)
    assert (tmp_path / "page.html").read_bytes() == (made / PAGE).read_bytes()


def test_snakemake_makes_its_own_report(finished: Project) -> None:
    finished.run("--report", "report.html")
    assert "What the network predicts while noise becomes an image" in (finished / "report.html").read_text()
