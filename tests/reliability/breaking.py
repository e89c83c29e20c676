"""A real MLflow server that can be killed, and a proxy in front of it that breaks requests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import ClassVar


class BreakingProxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to a server, and breaks some: 500, 503, a reset, an answer lost after the work, a delay.

    Refuses uploads of more than `largest` bytes."""

    protocol_version = "HTTP/1.1"
    target = 0
    broken = 0.0
    delay_s = 0.3
    largest = 1 << 30  # bytes of an upload
    all_names = ("500", "503", "reset", "lost", "slow")
    names = all_names
    rng = random.Random(2)
    faults: ClassVar[Counter[str]] = Counter()

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        fault = self.rng.choice(self.names) if self.rng.random() < self.broken else "none"
        self.faults[fault] += 1
        if self.command == "PUT" and len(body) > self.largest:
            self.answer(413, [], b"<html>Request Entity Too Large</html>")
        elif fault in ("500", "503"):
            self.answer(int(fault), [], b"broken")
        elif fault == "reset":
            self.cut()
        else:
            skipped = ("transfer-encoding", "content-length", "connection")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):  # the server is dead, or dies now
                self.cut()
                return
            connection.close()
            if fault == "lost":
                self.cut()
                return
            if fault == "slow":
                time.sleep(self.delay_s)
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
            self.answer(answer.status, kept, content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real MLflow server on loopback, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.database, self.port = folder / "mlflow.db", free_port()
        self.folder = folder

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.folder / "mlruns"), "--workers", "1", "--port", str(self.port)]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            command, env=environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
        )
        until = time.monotonic() + 240
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text())

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
