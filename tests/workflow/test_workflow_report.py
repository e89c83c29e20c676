"""The page of an experiment: everything in one file, the same bytes for the same results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from projects import ROOT, Project

PAGE = "results/micro/report/index.html"


def test_the_page_needs_no_other_file(made: Project) -> None:
    page = (made / PAGE).read_text()
    assert set(re.findall(r'(?:src|href)="([a-z]+)', page)) <= {"data"}


def test_the_page_shows_what_was_found(made: Project) -> None:
    page = (made / PAGE).read_text()
    shown = ["<h1>micro</h1>", "Samples", "inpipe_fd", "train/loss", "num_samples", "global_batch"]
    shown += ["Training images", "No file was quarantined", "Runtimes", "most memory", "Provenance", "commit"]
    assert [each for each in shown if each not in page] == []


def test_bad_files_are_listed(fresh: Project) -> None:
    (fresh / "images/dark/broken.png").write_bytes(b"no picture")
    fresh.run("results/datasets/dots-16/crops/manifest.json")
    script = [sys.executable, ROOT / "workflow/scripts/report.py", "--experiment", "results/micro"]
    subprocess.run(
        [*script, "--data", "results/datasets/dots-16/crops", "--output", "page.html"], cwd=fresh.folder, check=True
    )
    page = (fresh / "page.html").read_text()
    assert "Quarantined: 1 files" in page and "dark/broken.png" in page


def test_one_table_of_all_experiments(made: Project) -> None:
    page = (made / "results/summary.html").read_text()
    assert "<td>micro</td><td>dit</td><td>dots-16</td>" in page and "inpipe_fd" in page
    assert re.search(r"micro: dit on dots-16, 8 steps, inpipe_fd [\d.]+", (made / "logs/summary.log").read_text())


def test_the_same_results_give_the_same_page(made: Project, tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "workflow/scripts/report.py"]
    folders = ["--experiment", "results/micro", "--data", "results/datasets/dots-16/crops"]
    subprocess.run([*script, *folders, "--output", tmp_path / "page.html"], cwd=made.folder, check=True)
    assert (tmp_path / "page.html").read_bytes() == (made / PAGE).read_bytes()


def test_snakemake_makes_its_own_report(finished: Project) -> None:
    finished.run("--report", "report.html")
    assert "What the network predicts while noise becomes an image" in (finished / "report.html").read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    browser.cut_off()
    yield browser
    browser.close()


def pictures_shown(browser: Browser) -> list[bool]:
    """Of every picture on the page, whether it is there."""
    shown: list[bool] = browser.evaluate("[...document.images].map(each => each.complete && each.naturalWidth > 0)")
    return shown


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("page", [PAGE, "results/summary.html"])
def test_without_a_network_the_pages_show_all_pictures(made: Project, browser: Browser, page: str) -> None:
    browser.open((made / page).as_uri())
    browser.wait_for("micro")
    assert len(pictures_shown(browser)) >= 1 and all(pictures_shown(browser))
    assert browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_without_a_network_the_report_of_snakemake_shows_all_pictures(finished: Project, browser: Browser) -> None:
    finished.run("--report", "report.html")
    browser.open((finished / "report.html").as_uri())
    browser.wait_for("Snakemake", "Samples", "Experiments", "Summary", "Evaluation")
    names = browser.evaluate("Object.keys(results).filter(name => results[name].mime_type === 'image/png')")
    assert {"results/micro/samples/grid.png", "results/micro/samples/steps.png"} <= set(names)
    for name in names:
        browser.evaluate(f"app.setView({{content: 'img', contentPath: results[{json.dumps(name)}].data_uri}})")
        until = time.monotonic() + 30
        while not any(pictures_shown(browser)) and time.monotonic() < until:
            time.sleep(0.1)
        assert pictures_shown(browser) and all(pictures_shown(browser)), name
    assert browser.complaints == []
