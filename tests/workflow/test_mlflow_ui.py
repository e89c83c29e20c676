"""Pages of MLflow's user interface, rendered in headless Chromium.

Screenshots are written to the test's temporary folder, or to the folder in IMAGE_DIFFUSION_SCREENSHOTS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from PIL import Image

from image_diffusion.core.files.atomic import read_json, write_json
from image_diffusion.core.files.checksums import manifest_digest
from image_diffusion.core.journal.writer import Journal
from image_diffusion.tracking.connection import LINK
from image_diffusion.tracking.plan import Request
from tiny_models import write_model

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"), pytest.mark.slow]


MANIFEST: dict[str, Any] = {
    "kind": "crops",
    "num_samples": 1234,
    "classes": ["dark", "light"],
    "shape": [3, 64, 64],
    "shards": [],
}


def make_experiment(results: Path, name: str, decay: float) -> Path:
    """Write an experiment with curves, grids with less and less noise, system metrics, weights and an evaluation."""
    experiment, rng = results / name, np.random.default_rng(0)
    (experiment / "train").mkdir(parents=True)
    with Journal.open(experiment / "journal", "train", tags={"manifest_digest": manifest_digest(MANIFEST)}) as journal:
        journal.params({"train": {"steps": 400, "lr": decay}, "network": {"type": "dit", "depth": 4}})
        for step in range(1, 401):
            loss = 0.1 + np.exp(-decay * step) + 0.02 * rng.normal()
            journal.metrics({"loss/mean": loss, "grad_norm": 1 + rng.random()}, step=step, examples_seen=64 * step)
            if step % 20 == 0:
                journal.metrics(
                    {"system/cpu_utilization_percentage": 90 + rng.random(), "speed/images_per_s": 99}, step
                )
            if step % 100 == 0:
                noise = rng.normal(0, 255 * np.exp(-decay * step), (8 * 64, 8 * 64, 3))
                tile = np.add.outer(np.arange(512) // 64, np.arange(512) // 64)[..., None] * [16, 10, 4]
                Image.fromarray(np.clip(tile + noise, 0, 255).astype(np.uint8)).save(experiment / "grid.png")
                journal.image("samples/ema", experiment / "grid.png", step=step)
    write_model(experiment, 400, seed=round(1000 * decay))
    with Journal.open(experiment / "journal", "evaluate") as journal:
        journal.params({"seed": 0})
        journal.metrics({"fid": 5 / decay, "recall": 0.5}, step=400)
    weights = {"sha256": read_json(experiment / "train/model.json")["sha256"]}
    judged = {"fid": {"value": 5 / decay, "interval": [4 / decay, 6 / decay]}}
    write_json(experiment / "metrics.json", {"metrics": judged, "protocol": {"weights": weights}})
    return experiment


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The user interface as `make ui` starts it, showing two experiments."""
    from image_diffusion.tracking.tracker import Tracker

    folder = tmp_path_factory.mktemp("ui")
    data = folder / "results/datasets/shapes-64"
    write_json(data / "crops/manifest.json", MANIFEST)
    for name, decay in (("small", 0.01), ("large", 0.02)):
        experiment = make_experiment(folder / "results", name, decay)
        Tracker(f"sqlite:///{folder / 'mlflow.db'}", "shapes").send(Request(experiment, [data]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["sh", str(ROOT / "workflow" / "scripts" / "ui.sh"), str(folder / "mlflow.db"), str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 240
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("IMAGE_DIFFUSION_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def api(address: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: dict[str, Any] = json.load(answer)
        return content


def test_runs_table(address: str, browser: Browser, shots: Path) -> None:
    browser.open(f"{address}/#/experiments/1?workflowType=machine_learning")
    browser.wait_for("shapes", "small", "large", "image_diffusion.stages.train")
    browser.screenshot(shots / "1-runs.png")


def test_shipped_view_has_column_for_headline_metric(address: str, browser: Browser, shots: Path) -> None:
    browser.open(f"{address}/#/experiments/1/runs{LINK}")
    browser.wait_for("shapes", "small", "large", "evaluate/fid", "train.steps", "250", "500")
    browser.screenshot(shots / "1-view.png")


def test_charts_show_curves_quality_and_grids_of_all_experiments(address: str, browser: Browser, shots: Path) -> None:
    browser.open(f"{address}/#/experiments/1/runs?workflowType=machine_learning&compareRunsMode=CHART")
    browser.wait_for("small", "large", "loss/mean", "large (loss/mean)", "evaluate/fid", "samples/ema")
    browser.slide_to_end()
    browser.wait_for("samples/ema", pictures=2)
    browser.screenshot(shots / "2-charts.png")


def test_run_page(address: str, browser: Browser, shots: Path) -> None:
    runs = api(address, "runs/search", experiment_ids=["1"], filter="attributes.run_name = 'small'")["runs"]
    page = f"{address}/#/experiments/1/runs/{runs[0]['info']['run_id']}"
    browser.open(f"{page}?workflowType=machine_learning")
    browser.wait_for("train.steps", "400", "network.type", "dit", "Finished", "trace/config_digest", "evaluate small")
    browser.screenshot(shots / "3-run.png")
    browser.open(f"{page}/model-metrics?workflowType=machine_learning")
    browser.wait_for("loss", "fid", "samples/ema")
    browser.slide_to_end()
    browser.wait_for("samples/ema", pictures=1)
    browser.screenshot(shots / "4-run-charts.png")
    browser.open(f"{page}/system-metrics?workflowType=machine_learning")
    browser.wait_for("cpu_utilization_percentage")
    browser.screenshot(shots / "5-run-system.png")
    browser.open(f"{page}/artifacts?workflowType=machine_learning")
    browser.wait_for("images", "train")
    browser.screenshot(shots / "6-run-files.png")


def test_best_run_with_its_samples_and_data_is_three_clicks_away(address: str, browser: Browser, shots: Path) -> None:
    """Starting from the link that `make ui` prints. The smaller distance in the table is that of `large`."""
    browser.open(f"{address}/#/experiments/1/runs{LINK}")
    seen = browser.wait_for("small", "large", "evaluate/fid", "250", "500", "shapes-64")
    assert seen.index("evaluate/fid") < seen.index("250"), "a column that says which is better"
    browser.click("large")
    browser.wait_for("Number 1 of 2 runs on this data", "better than small", "shapes-64/crops")
    browser.click("shapes-64/crops")
    browser.wait_for("samples: 1234", "classes: 2", "shape: 3 x 64 x 64")
    browser.screenshot(shots / "9-data.png")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
    browser.click("Model metrics")
    browser.wait_for("samples/ema", "loss/mean")
    browser.slide_to_end()
    browser.wait_for("samples/ema", pictures=1)


def test_model_pages_mark_best_version(address: str, browser: Browser, shots: Path) -> None:
    browser.open(f"{address}/#/experiments/1/models?workflowType=machine_learning")
    browser.wait_for("small", "large", "fid", "250", "500", "shapes.shapes-64.fid", "image_diffusion.stages.train")
    browser.screenshot(shots / "7-models.png")
    browser.open(f"{address}/#/models/shapes.shapes-64.fid?workflowType=machine_learning")
    browser.wait_for("Version 1", "Version 2", "best")
    browser.screenshot(shots / "8-registered.png")
