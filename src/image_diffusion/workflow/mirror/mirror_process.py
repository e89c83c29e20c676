"""The process that updates the mirror of a project; it runs with Snakemake on the same machine and ends with it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from image_diffusion.core.config.base import Config, parse
from image_diffusion.core.files.mirrored import VARIABLE
from image_diffusion.core.process.errors import log_line
from image_diffusion.core.process.parent_watch import VARIABLE as ENDS_WITH
from image_diffusion.workflow.environment import with_package
from image_diffusion.workflow.mirror.snapshot import Project

_SOON_S = 2.0
READY, DONE = "ready", "done"
"""Lines that the process prints when the small files, and then the large files, are on this disk."""


class MirrorConfig(Config):
    """Setting `mirror` of config.yaml."""

    url: str = Field(min_length=1)
    """URL of the mirror: s3://BUCKET/PREFIX, or another URL of fsspec."""
    every_s: float = Field(30.0, gt=0)
    """Seconds between searches for new results, and between heartbeats."""
    silence_s: float = Field(120.0, gt=0)
    """Seconds without a heartbeat after which another machine takes over."""

    @staticmethod
    def parse(setting: str | Mapping[str, Any] | None) -> MirrorConfig | None:
        """Parse the setting: a URL or a section; None if it is unset. Raises ValueError."""
        if not setting:
            return None
        config: MirrorConfig = parse(MirrorConfig, {"url": setting} if isinstance(setting, str) else setting, "mirror")
        if "://" not in config.url:
            raise ValueError(f"mirror is {config.url}, which is no URL. Write s3://BUCKET/PREFIX, or file:///FOLDER.")
        if config.silence_s < 3 * config.every_s:
            raise ValueError(
                f"mirror.silence_s is {config.silence_s:g}, less than three times mirror.every_s "
                f"({config.every_s:g}): a machine that works would be taken for a lost one."
            )
        return config


class Mirroring:
    """The process that updates the mirror; no process without the setting."""

    def __init__(self, setting: str | Mapping[str, Any] | None, results: str, source: Path) -> None:
        """Start the process and wait until the small files of the newest snapshot are on this disk. On an error,
        Snakemake exits with one line. source: the folder that holds the package."""
        self._process: subprocess.Popen[str] | None = None
        self._url = ""
        try:
            config = MirrorConfig.parse(setting)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        if config is None:
            return
        self._url = config.url
        os.environ[VARIABLE] = str((Project(Path(results)).state / "absent.json").absolute())
        options = ["--url", config.url, "--every-s", str(config.every_s), "--silence-s", str(config.silence_s)]
        environment = with_package(source)
        environment.pop(ENDS_WITH, None)  # it outlives Snakemake to send the last results
        # Its own process group: Ctrl-C stops the stages only, and their last results are still sent.
        self._process = subprocess.Popen(
            [
                *("nice", sys.executable, "-m", "image_diffusion", "mirror", "--follow"),
                *("--results", results, *options),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._wait(READY)
        atexit.register(self.end)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell may start Snakemake in the background, ignoring SIGINT, which must end it if the mirror is lost.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def fetch(self, folders: Collection[str]) -> None:
        """Download the large files that Snakemake expects in these folders of results."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write("\t".join(sorted(folders)) + "\n")
            self._process.stdin.flush()
            self._wait(DONE)

    def end(self) -> None:
        """Wait until everything has been sent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SOON_S)
            if self._process.poll() is None:
                log_line(f"note: the last results go to {self._url}.")
                self._process.wait()
            self._process = None

    def _wait(self, line: str) -> None:
        assert self._process is not None and self._process.stdout is not None
        if self._process.stdout.readline().strip() != line:
            self._process.wait()
            raise SystemExit(1)  # the process has printed the reason
