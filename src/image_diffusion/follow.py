"""Send what stages log to MLflow while they run, until standard input ends; then all that is left.

    python -m image_diffusion.follow --store sqlite:///mlflow.db --project demo --results results --experiments demo

The workflow keeps one of these beside itself. It looks at journals only: training does not know of it, and a store that
is down or slow delays nothing but what is shown. A Snakemake that dies closes the pipe to it, so that it ends as well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from image_diffusion.core.command import Parser, run
from image_diffusion.core.secrets import store_named
from image_diffusion.tracking.plan import Request, request_of, watched

if TYPE_CHECKING:
    from image_diffusion.tracking.tracker import Tracker


def follow(
    connect: Callable[[], Tracker],
    requests: Sequence[Request],
    every_s: float,
    stop: threading.Event,
    share: float = 0.02,
) -> None:
    """Send what is new every `every_s` seconds until stopped, then once more.

    A store that fails is told of once and tried again; the last time its TrackingError is raised. share: of one core,
    at most, once the store is open: training may need every core.
    """
    tracker: Tracker | None = None
    sent: dict[Path, object] = {}
    told, pause_s = "", every_s
    while True:
        last = stop.wait(pause_s)
        spent_from: float | None = None
        try:
            for request in requests:
                state = watched(request)
                if state is None or (sent.get(request.experiment) == state and not last):
                    continue
                tracker = tracker or connect()
                spent_from = spent_from or time.process_time()
                tracker.send(request, live=not last)
                sent[request.experiment] = state
            told = ""
        except (OSError, ValueError) as error:
            if last:
                raise
            if str(error) != told:
                told = str(error)
                print(f"warning: {told} Trying again every {every_s:g} s.", file=sys.stderr, flush=True)
        if last:
            return
        spent_s = 0.0 if spent_from is None else time.process_time() - spent_from
        pause_s = max(every_s, spent_s / share)


def _connected(store: str, project: str) -> Tracker:
    # It imports MLflow: seconds of a core, not before there is something to send.
    from image_diffusion.tracking.tracker import Tracker

    return Tracker(store, project)


def main() -> None:
    parser = Parser(prog="python -m image_diffusion.follow", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--store",
        help="MLflow tracking URI, e.g. sqlite:///mlflow.db; unset: MLFLOW_TRACKING_URI, where no one sees a password",
    )
    parser.add_argument("--project", required=True, help="the MLflow experiment that holds the runs")
    parser.add_argument("--results", required=True, type=Path, help="the folder of all results")
    parser.add_argument("--experiments", required=True, nargs="+", help="names of configured experiments")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="how often to look (10)")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    store = store_named(options.store)
    requests = [request_of(options.results, name) for name in options.experiments]
    follow(lambda: _connected(store, options.project), requests, options.every, stop)


if __name__ == "__main__":
    run(main)
