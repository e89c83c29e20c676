# What stages log goes to MLflow while they run: one process beside Snakemake, on its machine, which ends with it.
import subprocess
import sys
from pathlib import Path

followers = []
follow_command = [
    *(sys.executable, "-m", "image_diffusion.follow", "--results", results),
    *("--every", str(config["tracking"].get("every_s"))),
    *("--store", config["tracking"]["uri"], "--project", config["tracking"]["project"], "--experiments", *plans),
]
follow_log = Path("logs", "follow.log")


def start_following():
    """Start `follow`, where config.yaml asks for it. It ends when the pipe to it is closed, so also when we are killed."""
    if not config["tracking"].get("every_s"):
        return
    follow_log.parent.mkdir(exist_ok=True)
    with follow_log.open("wb") as log:
        # Stages go before it. A process group of its own: Ctrl-C is for the stages, and what they then say is still sent.
        command = ["nice", *follow_command]
        follower = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)
    followers.append(follower)


def end_following():
    """Send what is left, in the foreground; a store that does not answer is not waited for."""
    while followers:
        follower = followers.pop()
        follower.kill()  # it may be in the middle of something: sending is safe against that
        follower.wait()
        with follow_log.open("ab") as log:
            try:
                done = subprocess.run(follow_command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60)
                failed = done.returncode
            except subprocess.TimeoutExpired:
                failed = True
        if failed:
            print(
                f"warning: MLflow did not take everything yet, as {follow_log} says; the next run sends it.",
                file=sys.stderr,
            )


onstart:
    start_following()


onsuccess:
    end_following()


# Snakemake knows one block of each kind.
onerror:
    end_following()
    tell_of_unseen_jobs(log)
