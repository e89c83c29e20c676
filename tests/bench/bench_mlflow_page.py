"""How long MLflow's chart page takes to open, in headless Chromium, on a store of many runs.

    python tests/bench/bench_mlflow_page.py [--runs 100] [--points 1000] [--screenshot charts.png]

The page is the one that `make ui` prints, its server the one that `make ui` starts. It counts as open when the first
chart has its curves.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "workflow"))

from browser import Browser  # noqa: E402

_KEYS = (
    "loss/mean",
    "loss/q0",
    "loss/q3",
    "validation/loss",
    "grad_norm",
    "speed/images_per_s",
    "lr",
    "x1",
    "x2",
    "x3",
)
_CURVES = "document.querySelectorAll('.scatterlayer .trace').length"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=1000, help="of each run, over ten keys")
    parser.add_argument("--screenshot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "mlflow.db"
        fill(f"sqlite:///{store}", options.runs, options.points)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["sh", str(ROOT / "workflow" / "scripts" / "ui.sh"), str(store), str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        browser = Browser(Path(folder) / "chromium")
        try:
            wait_for_server(port)
            page = f"http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning"
            browser.open(page)
            browser.wait_for("run-0")  # the application itself is loaded, as in a browser that has been there before
            seconds = [opened(browser, f"{page}&compareRunsMode=CHART") for _ in range(3)]
            if options.screenshot:
                browser.screenshot(options.screenshot)
        finally:
            browser.close()
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    shown = ", ".join(f"{each:.1f}" for each in seconds)
    print(f"{options.runs} runs, {options.runs * options.points:,} points: the charts are there after {shown} s")


def fill(store: str, runs: int, points: int) -> None:
    """Write a store of runs with ten curves each."""
    client = MlflowClient(store)
    experiment = client.create_experiment("many")
    for number in range(runs):
        run = client.create_run(experiment, run_name=f"run-{number}").info.run_id
        metrics = [
            Metric(key, 1 / (step + 1) + 0.01 * number, 1_000_000 + step, step)
            for key in _KEYS
            for step in range(points // len(_KEYS))
        ]
        client.log_batch(run, metrics=metrics)
        client.set_terminated(run)


def wait_for_server(port: int) -> None:
    """Until it answers. Raises AssertionError after two minutes."""
    until = time.monotonic() + 120
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.2)


def opened(browser: Browser, page: str) -> float:
    """Return seconds until the first chart of a page has ten curves: as many runs as MLflow shows at first."""
    start = time.monotonic()
    browser.open(page)
    while int(browser.evaluate(_CURVES) or 0) < 10:
        assert time.monotonic() - start < 120, "no curves"
        time.sleep(0.05)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
