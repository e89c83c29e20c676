"""What every command shares: how it ends, with one clear line for people and a status for Snakemake."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from image_diffusion.core.attempt import ending_of, note
from image_diffusion.core.errors import Stopped
from image_diffusion.core.exhausted import sentence_on
from image_diffusion.core.lifeline import VARIABLE, end_with
from image_diffusion.core.secrets import hidden
from image_diffusion.core.telling import tell

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later


COMMANDS = (
    *("init", "configure", "crop", "datasheet", "detect", "reference", "encode", "embed", "doctor", "train", "ema"),
    *("sample", "evaluate", "sweep", "export", "published", "track", "follow", "crate", "completion"),
)
"""Every command, in the order in which one comes to it."""


class Parser(argparse.ArgumentParser):
    """A command's options. What describes it keeps its lines in the help."""

    asked = False
    """Whether no command is to run, and only its options are wanted."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | named)

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """The options that are given."""
        if Parser.asked:
            raise _AskedError(*(option for action in self._actions for option in action.option_strings))
        return super().parse_known_args(*given, **named)

    def error(self, message: str) -> NoReturn:
        """End: what is given is wrong, and would be so again."""
        note("mistake", message)
        super().error(message)

    def add_config(self, about: str, required: bool = True) -> None:
        """--config, the file of a stage, and --set, what is to be another value than it says."""
        self.add_argument("--config", type=Path, required=required, help=about)
        self.add_argument(
            *("--set", "-s"),
            dest="changes",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a key of --config and the value to take in place of its own, such as sample.num_samples=16; again "
            "for others",
        )


class _AskedError(Exception):
    """Carries the options of a command that was to tell them."""


def options_of(main: Callable[[], None]) -> list[str]:
    """The options of a command, such as --config, from its own `main`, which goes no further."""
    Parser.asked = True
    try:
        main()
    except _AskedError as found:
        return [str(option) for option in found.args]
    finally:
        Parser.asked = False
    raise ValueError(f"{main.__module__} reads no options.")


def part_of(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8): part 2 of the parts 0 to 7, of work that several jobs share."""
    try:
        index, count = (int(number) for number in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no part. Write 2/8 for part 2 of the parts 0 to 7.") from None
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"'{text}' is no part: parts are numbered from 0 to {count - 1}.")
    return index, count


def run(main: Callable[[], None], *smaller: str) -> None:
    """Call `main` and end the process: 0 when it returns, 75 when it was stopped and can go on, 1 for a mistake.

    ValueError, OSError, and what a full disk or too little memory raises, are told in one line;
    IMAGE_DIFFUSION_TRACEBACK=1 shows where they came from. Any other exception is a defect of this program and keeps
    its traceback. smaller: the keys of an experiment that make this command need less memory when they are smaller.
    """
    end_with(os.environ.get(VARIABLE, "").split())
    try:
        main()
    except Stopped as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it was asked to, perhaps by more than one
        tell(f"stopped: {stopped}")
        note("stopped", str(stopped))
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        tell("stopped: interrupted. Run the same command again to go on.")
        sys.exit(130)
    except Exception as error:
        sentence = sentence_on(error, smaller)
        told = sentence is not None or isinstance(error, ValueError | OSError)
        if not told or os.environ.get("IMAGE_DIFFUSION_TRACEBACK") == "1":
            tell(hidden(traceback.format_exc()))
        if told:
            tell(hidden(f"error: {sentence or error}"))
        note(ending_of(error), hidden(f"{sentence or error or type(error).__name__}"))
        sys.exit(1)
