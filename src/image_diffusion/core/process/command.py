"""Shared behaviour of commands: errors are reported in one line, and exit statuses are for Snakemake.

The outcome of each attempt is noted in a file next to the log of the stage, since a queue reports only an exit status.
`workflow/scripts/logged` adds a line for each attempt in a job of a queue, and only there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from image_diffusion.core.process.errors import Stopped, is_of_host_memory, log_line, sentence_on
from image_diffusion.core.process.parent_watch import VARIABLE, end_with
from image_diffusion.core.process.secrets import hidden

ATTEMPT = "IMAGE_DIFFUSION_ATTEMPT"
"""The environment variable that names the note."""

Ending = Literal["stopped", "mistake", "memory", "accident"]
"""stopped: stopped on request after saving. mistake: would fail again. memory: would succeed with more memory.
accident: failure of the machine, network or file system, or any unexpected error."""


@dataclass(frozen=True)
class JobOutcome:
    """An attempt at a stage in a job of a queue."""

    job: str
    """Number of the job."""
    host: str
    """Machine of the job, or the first of several."""
    began: float
    """Start time, in seconds since 1970."""
    ending: Ending | None = None
    """Ending of the attempt; None if it was killed, is running, or succeeded."""
    said: str = ""
    """Message of its ending."""


def note(ending: Ending, said: str) -> None:
    """Record the ending of this process. Of several processes, the first that ends gives the reason."""
    if path := os.environ.get(ATTEMPT):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([ending, said]) + "\n")


def ending_of(error: Exception) -> Ending:
    """Classify an error. A full disk or GPU is a mistake, since it would be full again."""
    if is_of_host_memory(error):
        return "memory"
    return "mistake" if isinstance(error, ValueError) or sentence_on(error) else "accident"


def read_attempts(path: Path) -> list[JobOutcome]:
    """Return the attempts in a note, the oldest first; empty if the note does not exist."""
    attempts: list[JobOutcome] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, IndexError):  # a truncated line, or a line of another version
                if not line.startswith("["):
                    job, host, began = line.split()
                    attempts.append(JobOutcome(job, host, float(began)))
                elif attempts[-1].ending is None:  # the first process that ends gives the reason
                    ending, said = json.loads(line)
                    attempts[-1] = replace(attempts[-1], ending=ending, said=said)
    return attempts


STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Parser(argparse.ArgumentParser):
    """Parser of command-line options, whose help keeps the line breaks of the description."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs)

    def error(self, message: str) -> NoReturn:
        """Exit with a usage error, recorded as a mistake, since retrying cannot help."""
        note("mistake", message)
        super().error(message)

    def add_path(self, name: str, about: str, **options: Any) -> None:
        """Add an option that takes a path."""
        self.add_argument(name, type=Path, help=about, **options)

    def add_paths(self, name: str, about: str) -> None:
        """Add an option that takes several paths; default: none."""
        self.add_path(name, about, nargs="+", default=[])

    def add_config(self, about: str, required: bool = True) -> None:
        """Add --config, the file of a stage, and --set, which overrides values of the file."""
        self.add_argument("--config", type=Path, required=required, help=about)
        self.add_argument(
            *("--set", "-s"),
            dest="changes",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="set a key of --config to another value, such as sample.num_samples=16; may be repeated",
        )


def part_of(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8): part 2 of the parts 0 to 7, of work that several jobs share."""
    try:
        index, count = (int(number) for number in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a part. Write 2/8 for part 2 of the parts 0 to 7.") from None
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"'{text}' is not a part: parts are numbered from 0 to {count - 1}.")
    return index, count


def run(main: Callable[[], None], *smaller: str) -> None:
    """Call `main` and end the process: with 0 on success, 75 if stopped and resumable, 1 on an error, 130 on Ctrl-C.

    ValueError, OSError, a missing package, a full disk and too little memory are reported in one line;
    IMAGE_DIFFUSION_TRACEBACK=1 shows the traceback. Any other exception is a defect of this program and is shown with
    its traceback. smaller: keys of an experiment whose reduction saves memory in this command.
    """
    gc.freeze()  # excludes imported objects from all collections, including the final one: 0.4 CPU s
    gc.enable()  # disabled during imports
    end_with(os.environ.get(VARIABLE, "").split())
    try:
        main()
    except Stopped as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it was received, possibly more than once
        log_line(f"stopped: {stopped}")
        note("stopped", str(stopped))
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        log_line("stopped: interrupted. Run the same command again to resume.")
        sys.exit(130)
    except Exception as error:
        sentence = sentence_on(error, smaller) or _on_package(error)
        is_expected = sentence is not None or isinstance(error, ValueError | OSError)
        if not is_expected or os.environ.get("IMAGE_DIFFUSION_TRACEBACK") == "1":
            log_line(hidden(traceback.format_exc()))
        if is_expected:
            line = hidden(f"error: {sentence or error}")
            log_line(line)
            _leave_for_launcher(line)
        note(ending_of(error), hidden(f"{sentence or error or type(error).__name__}"))
        sys.exit(1)


def _leave_for_launcher(line: str) -> None:
    """Write the last line of this process to torchrun's error file, if torchrun started this process."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}), encoding="utf-8")


def _on_package(error: Exception) -> str | None:
    """Return a sentence on a package that is not installed; None for any other error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in ("", "image_diffusion") or package in sys.stdlib_module_names:
        return None
    return f"The package {package} is needed and not installed. Install it: pip install {package}"
