"""Send the journals of running stages to MLflow until standard input ends, and then the remaining entries.

The workflow runs a process with `track --follow`. It reads journals only: it does not affect training, and a slow or
unavailable store delays only the display. New entries are sent by a short-lived process, so that little memory is held.
If Snakemake is killed, the pipe to this process is closed, which ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from image_diffusion.core.process.errors import log_line
from image_diffusion.core.process.parent_watch import end_with, process_identifier
from image_diffusion.tracking.plan import Request, watched


def stop_at_end() -> threading.Event:
    """Return an event that is set at SIGTERM, at SIGINT, and when standard input ends."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    return stop


def follow(
    send: Callable[[Sequence[Request], bool], None],
    requests: Sequence[Request],
    every_s: float,
    stop: threading.Event,
    share: float = 0.05,
    at_first_s: float = 5.0,
) -> None:
    """Send new entries every `every_s` seconds until stopped, then once more.

    send: takes the changed requests and whether stages may still run. An error of the store is reported once, and
    sending is retried; the last time, the TrackingError is raised. share: maximum share of one core, after `at_first_s`
    seconds of CPU time, since training may need every core.
    """
    sent: dict[Path, object] = {}
    message, pause_s, begun_s, spent_s = "", every_s, time.monotonic(), _cpu_seconds()
    while True:
        last = stop.wait(pause_s)
        try:
            states = {request.experiment: watched(request) for request in requests}
            new = [name for name, state in states.items() if state is not None and (last or sent.get(name) != state)]
            if new:
                send([request for request in requests if request.experiment in new], not last)
                sent.update({name: states[name] for name in new})
            message = ""
        except (OSError, ValueError) as error:
            if last:
                raise
            if str(error) != message:
                message = str(error)
                log_line(f"warning: {message} Trying again every {every_s:g} s.")
        if last:
            return
        earned_s = time.monotonic() - begun_s
        pause_s = max(every_s, (_cpu_seconds() - spent_s - at_first_s) / share - earned_s)


def send(store: str, project: str, requests: Sequence[Request], live: bool) -> None:
    """Send experiments to an MLflow store. live: see `Tracker.send`. Raises TrackingError if it refuses."""
    # Imports MLflow, which takes seconds of CPU time, and memory that the process never releases.
    from image_diffusion.tracking.connection import deferring_too_large
    from image_diffusion.tracking.tracker import Tracker

    tracker = Tracker(store, project)
    with deferring_too_large() as part:
        for request in requests:
            with part():
                tracker.send(request, live)


def send_in_subprocess(store: str, project: str, requests: Sequence[Request], live: bool) -> None:
    """Send in a process of its own, which ends with this one: MLflow takes 0.2 GB, a model 0.7 GB. Raises OSError."""
    apart = get_context("spawn")
    receiver, sender = apart.Pipe(duplex=False)
    process = apart.Process(
        target=_send_and_report, args=(sender, process_identifier(), store, project, requests, live)
    )
    process.start()
    sender.close()
    try:
        refused = receiver.recv()
    except EOFError:
        refused = "The process that sends to MLflow was killed."
    process.join()
    if refused:
        raise OSError(refused)


def _send_and_report(sender: Connection, parent: str, *arguments: Any) -> None:
    """Send, and then pass the text of the error to `sender`, empty without an error."""
    end_with(parent.split())
    refused = ""
    try:
        send(*arguments)
    except (OSError, ValueError) as error:
        refused = str(error)
    sender.send(refused)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished child processes."""
    return sum(os.times()[:4])
