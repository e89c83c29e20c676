"""Send the logs of running stages to MLflow, in a process that runs and ends with Snakemake."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from image_diffusion.core.process.secrets import STORE
from image_diffusion.workflow.environment import with_package

LOG = Path("logs", "follow.log")
LOCK = Path(".snakemake", "following")
FINAL_SEND_TIMEOUT_S = 60.0
"""Maximum time in seconds for sending the rest after all jobs have ended."""


@dataclass
class Following:
    """Process `track --follow`, if config.yaml enables it."""

    tracking: Mapping[str, Any]
    """Section `tracking` of config.yaml. The store's URI may contain a password and is passed in the environment."""
    source: Path
    """Folder that holds the package."""
    results: str
    experiments: Iterable[str]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _lock: TextIO | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process, unless another Snakemake here runs one. It ends with this process, by its pipe."""
        if not self.tracking.get("every_s"):
            return
        LOCK.parent.mkdir(exist_ok=True)
        self._lock = LOCK.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("wb") as log:
            # Stages have priority. Its own process group: Ctrl-C stops the stages only, and their last entries are
            # still sent.
            self.process = subprocess.Popen(
                ["nice", *self._command()],
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def end(self) -> None:
        """Send the remaining entries in the foreground, at most for `FINAL_SEND_TIMEOUT_S` seconds."""
        if self.process is None:
            return
        self.process.kill()  # sending can be interrupted safely
        self.process.wait()
        self.process = None
        assert self._lock is not None
        with self._lock, LOG.open("ab") as log:
            try:
                done = subprocess.run(
                    self._command(),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=FINAL_SEND_TIMEOUT_S,
                    check=False,
                )
                failed = done.returncode != 0
            except subprocess.TimeoutExpired:
                failed = True
        if failed:
            message = f"MLflow did not take everything yet, as {LOG} says; the next run sends it."
            print(f"warning: {message}", file=sys.stderr)

    def _environment(self) -> dict[str, str]:
        return {**with_package(self.source), STORE: self.tracking["uri"]}

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "image_diffusion", "track", "--results", self.results),
            *("--every", str(self.tracking["every_s"])),
            *("--project", self.tracking["project"], "--follow", *self.experiments),
        ]
