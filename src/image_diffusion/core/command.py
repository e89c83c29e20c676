"""What every command shares: how it ends, with one clear line for people and a status for Snakemake."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable

from image_diffusion.core.attempt import ending_of, note
from image_diffusion.core.errors import Stopped
from image_diffusion.core.exhausted import sentence_on
from image_diffusion.core.lifeline import VARIABLE, end_with
from image_diffusion.core.secrets import hidden

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later


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
        print(f"stopped: {stopped}", file=sys.stderr, flush=True)
        note("stopped", str(stopped))
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        print("stopped: interrupted. Run the same command again to go on.", file=sys.stderr, flush=True)
        sys.exit(130)
    except Exception as error:
        sentence = sentence_on(error, smaller)
        told = sentence is not None or isinstance(error, ValueError | OSError)
        if not told or os.environ.get("IMAGE_DIFFUSION_TRACEBACK") == "1":
            print(hidden(traceback.format_exc()), file=sys.stderr, flush=True)
        if told:
            print(hidden(f"error: {sentence or error}"), file=sys.stderr, flush=True)
        note(ending_of(error), hidden(f"{sentence or error or type(error).__name__}"))
        sys.exit(1)
