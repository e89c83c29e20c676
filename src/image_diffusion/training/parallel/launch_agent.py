"""Run the processes of one node by torchrun, and report errors in one line. Takes torchrun's arguments.

LOGLEVEL=INFO shows the messages of torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from image_diffusion.core.process import command
from image_diffusion.core.process.command import note
from image_diffusion.core.process.errors import log_line
from image_diffusion.training.parallel.launch import own_name


def main() -> None:
    """Start the processes and wait for them. Failures that the first process has reported are not reported again."""
    arguments = parse_args(sys.argv[1:])
    if not arguments.standalone and arguments.local_addr is None:
        arguments.local_addr = own_name(os.environ)  # the address that the other nodes connect to
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run(arguments)
    except SignalException as received:  # a process notes that it saved, unless it is starting or ending
        note("stopped", f"{received.sigval.name} came, and no process has noted that it saved.")
        sys.exit(command.STOPPED)
    except ChildFailedError as failed:
        _log_errors(failed.failures)
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = " The machine may have run out of memory: see train.microbatch." if name == "SIGKILL" else ""
        raise ChildProcessError(
            f"Process {rank} was ended by {name}.{hint} Run the same command again to go on from the last checkpoint."
        ) from None
    except RendezvousError as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(
            f"The nodes did not meet at {arguments.rdzv_endpoint}: {words}. Can every node reach that name and port?"
        ) from None


def _log_errors(failures: Mapping[int, ProcessFailure]) -> None:
    """Log the errors of processes that print only to files, each error once. failures: by rank."""
    errors: dict[str, int] = {}
    for rank, failure in sorted(failures.items()):
        file = Path(failure.error_file)  # of `command.run`
        if failure.local_rank > 0 and file.exists():
            shown = (file.parents[1] / "0" / "stderr.log").read_text(encoding="utf-8", errors="replace")
            if failure.message not in shown.splitlines():
                errors.setdefault(failure.message, rank)
    for message, rank in errors.items():
        log_line(f"{message} (process {rank})")


if __name__ == "__main__":
    command.run(main)
