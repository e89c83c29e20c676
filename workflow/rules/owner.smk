# One Snakemake at a time in a folder, and the same command goes on after any death of the one before.
import fcntl
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from snakemake.settings.types import DAGSettings


def take_over():
    """Clear away what a killed Snakemake left: its locks, and its jobs in a Slurm queue.

    It is dead when the lock that the system drops with a process is free. One that ran on another machine may be alive:
    then its locks stay, and Snakemake says that the folder is locked and how to unlock it. Returns what holds our lock.
    """
    Path(".snakemake").mkdir(exist_ok=True)
    mine = open(".snakemake/owner", "a+")
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return mine
    mine.seek(0)
    last_host = mine.read()
    left = list(Path(".snakemake", "locks").glob("*"))
    if left and last_host not in ("", socket.gethostname()):
        return mine
    if left:
        cancel_jobs()
        for lock in left:
            lock.unlink()
    mine.truncate(0)
    mine.write(socket.gethostname())
    mine.flush()
    return mine


def cancel_jobs():
    """Cancel our Slurm jobs that were sent from this folder: nobody waits for them any more."""
    if not shutil.which("squeue"):
        return
    queue = ["squeue", "--me", "--noheader", "--format=%i %k|%Z"]
    lines = subprocess.run(queue, capture_output=True, text=True).stdout.splitlines()
    jobs = [line.split()[0] for line in lines if " rule_" in line and line.endswith(f"|{Path.cwd()}")]
    if jobs:
        print(
            f"Cancelling what a killed Snakemake left in the queue: {' '.join(jobs)}",
            file=sys.stderr,
        )
        subprocess.run(["scancel", *jobs])


def tell_of_unseen_jobs(logs):
    """Name the Slurm jobs that failed before they could open their log: nothing else says why.

    logs: the files that Snakemake logs to.
    """
    said = "".join(Path(log).read_text() for log in logs)
    their_logs = dict(re.findall(r"SLURM jobid (\d+) \(log: (.+?)\)\.", said))
    failed = re.findall(r"SLURM-job '(\d+)' failed", said)
    if jobs := [job for job in failed if job in their_logs and not Path(their_logs[job]).exists()]:
        print(
            f"error: Slurm {'jobs' if jobs[1:] else 'job'} {', '.join(jobs)} left no log: a node does not see {Path.cwd()}. "
            "Clone into a folder that every node shares, and run there.",
            file=sys.stderr,
        )


if not workflow.remote_exec:
    owner = take_over()

# What a killed stage was making is made again, as with --rerun-incomplete: every command goes on from its own state and
# writes whole files. Snakemake takes this from the command line only, and after it has read the rules.
DAGSettings.force_incomplete = property(lambda settings: True, lambda settings, value: None)
