"""The page of an experiment: one self-contained file, the same bytes for the same results."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from PIL import Image
from projects import ROOT, Project

from image_diffusion.core.files.atomic import write_json

pytestmark = pytest.mark.slow

PAGE = "results/micro/report/index.html"


@pytest.mark.smoke
def test_the_page_needs_no_other_file(made: Project) -> None:
    page = re.sub("<script>.*?</script>", "", (made / PAGE).read_text(), flags=re.DOTALL)
    assert set(re.findall(r'(?:src|href)="([a-z]+)', page)) == {"data"}


@pytest.mark.smoke
def test_page_shows_results_and_provenance(made: Project) -> None:
    page = (made / PAGE).read_text()
    shown = ["<h1>micro</h1>", "Samples", "inpipe_fd", "train/loss", "num_samples", "global_batch"]
    shown += [
        "snakemake --cores all micro",
        "95 % interval",
        "Squared Fr\u00e9chet distance",
        "<mark>name: dots</mark>",
    ]
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
    assert re.search(r'<a href="micro/report/index.html">micro</a></td>\s*<td>dit</td><td>dots-16</td>', page)
    assert "inpipe_fd" in page
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
    """Return for every picture on the page whether it is loaded."""
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


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_reader_finds_curves_definitions_and_larger_pictures(made: Project, browser: Browser) -> None:
    browser.open((made / PAGE).as_uri())
    browser.wait_for("train/loss")
    drawn = (
        "[...document.querySelectorAll('figure.chart > div')].map(each => each.offsetHeight * each.childElementCount)"
    )
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    heights = browser.evaluate(drawn)
    assert len(heights) >= 5 and min(heights) > 100
    assert "less is better" in browser.evaluate("document.body.innerText")
    assert "Better: lower" in browser.evaluate("document.querySelector('.headline abbr, td abbr').title")
    browser.evaluate("document.querySelector('img.larger').click()")
    assert browser.evaluate(
        "document.querySelector('dialog').open && document.querySelector('dialog img').naturalWidth > 0"
    )
    browser.evaluate("document.querySelector('dialog').click()")
    assert not browser.evaluate("document.querySelector('dialog').open")
    assert browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("page", [PAGE, "results/summary.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_their_text_has_contrast(made: Project, browser: Browser, page: str, scheme: str) -> None:
    size = {"height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=400, **size)
    try:
        browser.open((made / page).as_uri())
        browser.wait_for("micro")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        assert browser.evaluate(CONTRAST) >= 4.5
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=2000, **size)
        browser.call("Emulation.setEmulatedMedia", features=[])


CONTRAST = """
(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const linear = parts.map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const shown = [...document.body.querySelectorAll("*")].filter(each =>
    each.offsetParent && each.tagName !== "IMG" && !each.closest(".chart > div")
    && [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return Math.min(...shown.map(each => {
    const [one, two] = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
    return (one + 0.05) / (two + 0.05);
  }));
})()
"""  # least contrast ratio (WCAG 2) of all text on the page


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_tables_sort_numbers_and_times_with_missing_values_last(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "workflow/scripts"))
    pages, heads = importlib.import_module("pages"), importlib.import_module("summary").HEADS
    like = {"system": "dit", "data": "d", "steps": 8, "metric": "fd", "interval": None, "report": "x", "metrics": {}}
    like |= {"grid": None, "reconstructions": None, "drawing": "", "floor": None, "doubt": None}
    cards = [
        like | {"name": "slow", "value": 3.0, "floor": 0.5, "time": "10:00:00", "seconds": "36000"},
        like | {"name": "near", "value": 9.0, "doubt": "near", "time": "0:05:00", "seconds": "300"},
        like | {"name": "fast", "value": 1.0, "time": "2:00:00", "seconds": "7200"},
        like | {"name": "none", "value": None, "time": "", "seconds": ""},
        like | {"name": "long", "value": 12.0, "floor": 0.4, "time": "1 day, 0:00:00", "seconds": "86400"},
    ]
    study = {"name": "s", "page": "s", "heads": ["variant"], "lines": [["base"], [2.0], [""], [10.0]]}
    page = pages.render("summary.html", heads=heads, experiments=cards, studies=[study], measured={})
    (tmp_path / "summary.html").write_text(page)
    browser.open((tmp_path / "summary.html").as_uri())
    browser.wait_for("long")

    def clicked(place: int, table: str = "#experiments") -> str:
        browser.evaluate(f"document.querySelectorAll('{table} th button')[{place}].click()")
        rows = f"[...document.querySelectorAll('{table} tbody tr')].map(row => row.cells[0].textContent).join(' ')"
        return str(browser.evaluate(rows))

    both = ("fast slow long near none", "long slow fast near none")
    assert [clicked(heads.index("value")) for _ in both] == [*both]
    assert clicked(heads.index("real images")) == "long slow fast near none"
    times = ("near fast slow long none", "long slow fast near none")
    assert [clicked(heads.index("training")) for _ in times] == [*times]
    assert [clicked(0, "#study-s + p + div") for _ in range(2)] == ["2 10 base ", "base 10 2 "]
    browser.evaluate("document.getElementById('order').value = 'time'")
    browser.evaluate("document.getElementById('order').dispatchEvent(new Event('change'))")
    gallery = "[...document.querySelectorAll('.gallery article')].map(card => card.dataset.name).join(' ')"
    assert browser.evaluate(gallery) == times[0] and browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_summary_keeps_earlier_experiments_and_compares_two(made: Project, browser: Browser, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for name in ("micro", "older"):
        shutil.copytree(made / "results/micro", results / name)
    script = [sys.executable, ROOT / "workflow/scripts/summary.py", "--results", results, "--experiments", "micro"]
    told = subprocess.run(
        [*script, "--output", results / "summary.html"], cwd=made.folder, check=True, capture_output=True, text=True
    )
    assert "older" not in told.stdout
    browser.open((results / "summary.html").as_uri())
    browser.wait_for("older", "Compare two")
    shown = "[...document.querySelectorAll('#experiments tbody tr')].filter(row => !row.hidden)"
    rows = f"{shown}.map(row => row.cells[0].textContent)"
    assert browser.evaluate(rows) == ["micro", "older"]
    for _ in range(2):  # ascending, then descending
        browser.evaluate("document.querySelector('#experiments th button').click()")
    assert browser.evaluate(rows) == ["older", "micro"]
    browser.evaluate("document.getElementById('filter').value = 'old'")
    browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    assert browser.evaluate(rows) == ["older"]
    cards = "[...document.querySelectorAll('.gallery article')].filter(card => !card.hidden)"
    assert browser.evaluate(f"{cards}.map(card => card.dataset.name)") == ["older"]
    browser.evaluate("document.querySelector('.gallery').prepend(document.querySelector('[data-name=older]'))")
    browser.evaluate("document.getElementById('filter').value = ''")
    browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.evaluate("document.getElementById('order').dispatchEvent(new Event('change'))")
    assert browser.evaluate(f"{cards}.map(card => card.dataset.name)") == ["micro", "older"]
    assert browser.evaluate("[...document.querySelectorAll('.pair img')].every(img => img.naturalWidth > 0)")
    assert "inpipe_fd" in browser.evaluate("document.getElementById('both').innerText")
    assert browser.evaluate("document.getElementById('unmeasured').hidden")
    assert browser.evaluate("document.getElementById('places').innerText").endswith("have the same seed.")
    described = json.loads((results / "older/samples/samples.json").read_text())
    described["settings"]["first_seed"] = 100
    write_json(results / "older/samples/samples.json", described)
    subprocess.run([*script, "--output", results / "summary.html"], cwd=made.folder, check=True, capture_output=True)
    browser.open((results / "summary.html").as_uri())
    browser.wait_for("older", "other seeds or labels")
    with Image.open(results / "older/samples/grid.png") as grid:
        grid.crop((0, 0, grid.width, 16)).save(results / "older/samples/grid.png")
    judged = json.loads((results / "older/metrics.json").read_text())
    write_json(results / "older/metrics.json", judged | {"metrics": {}})
    subprocess.run([*script, "--output", results / "summary.html"], cwd=made.folder, check=True, capture_output=True)
    browser.open((results / "summary.html").as_uri())
    browser.wait_for("older", "places do not correspond")
    assert not browser.evaluate("document.getElementById('unmeasured').hidden")
    assert browser.complaints == []
