"""Send the journals of running stages to MLflow until standard input ends, and then all that is left.

The workflow keeps a process with `track --follow` beside itself. It looks at journals only: training does not know of
it, and a store that is down or slow delays nothing but what is shown. A process that ends when it has sent them sends
new entries, so that little memory is held. A Snakemake that dies closes the pipe to this one, so that it ends as well.
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
from image_diffusion.core.process.parent_watch import end_with, mark
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

    send: takes what has changed and if stages may still run. A store that fails is reported once and tried again; the
    last time its TrackingError is raised. share: of one core, at most, after `at_first_s` seconds of it: training may
    need every core.
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
    """Send experiments to an MLflow store. live: see `Tracker.send`. Raises TrackingError when it refuses."""
    # It imports MLflow: seconds of a core, and memory that the process never gives back.
    from image_diffusion.tracking.tracker import Tracker

    tracker = Tracker(store, project)
    for request in requests:
        tracker.send(request, live)


def send_apart(store: str, project: str, requests: Sequence[Request], live: bool) -> None:
    """Send in a process of its own, which ends with it, or with this one: MLflow takes 0.2 GB, a model 0.7 GB. Raises
    OSError."""
    apart = get_context("spawn")
    receiver, sender = apart.Pipe(duplex=False)
    process = apart.Process(target=_send_and_report, args=(sender, mark(), store, project, requests, live))
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
    """Send, and then pass on the error's text, empty without an error."""
    end_with(parent.split())
    refused = ""
    try:
        send(*arguments)
    except (OSError, ValueError) as error:
        refused = str(error)
    sender.send(refused)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])
