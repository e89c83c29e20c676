# What stages log goes to MLflow while they run: one process beside Snakemake, on its machine, which ends with it.
import subprocess
import sys
from pathlib import Path

followers = []


def start_following():
    """Start `follow`, where config.yaml asks for it. It ends when the pipe to it is closed, so also when we are killed."""
    every_s = config["tracking"].get("every_s")
    if not every_s:
        return
    command = [sys.executable, "-m", "image_diffusion.follow", "--every", every_s, "--results", results]
    command += ["--store", config["tracking"]["uri"], "--project", config["tracking"]["project"]]
    Path("logs").mkdir(exist_ok=True)
    with open("logs/follow.log", "wb") as log:
        # A process group of its own: Ctrl-C is for the stages, and what they then say is still to be sent.
        follower = subprocess.Popen(
            [*map(str, command), "--experiments", *plans],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    followers.append(follower)


def end_following():
    """Have what is left sent; a store that does not answer is not waited for."""
    for follower in followers:
        follower.stdin.close()
        try:
            failed = follower.wait(timeout=60)
        except subprocess.TimeoutExpired:
            follower.kill()
            failed = follower.wait()
        if failed:
            print(
                "warning: MLflow did not take everything yet, as logs/follow.log says; the next run sends it.",
                file=sys.stderr,
            )
    followers.clear()


onstart:
    start_following()


onsuccess:
    end_following()


# Snakemake knows one block of each kind.
onerror:
    end_following()
    tell_of_unseen_jobs(log)
