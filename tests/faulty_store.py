"""A local proxy in front of an S3 server, which breaks requests: each kind is drawn at a rate, and counted.

Headers are forwarded unchanged, Host too, so that signatures hold and the server checks them. A server that compares
checksums refuses a body that was changed on its way. `rotten object` therefore signs the changed body again: the server
accepts it, like a store that damages its objects.
"""

from __future__ import annotations

import hashlib
import http.client
import http.server
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from bucket import REGION, Bucket

KINDS = {
    "503": "the answer is 503 SlowDown, and nothing is done",
    "slow": "the answer comes late",
    "cut put": "the connection is closed in the middle of the body of a PUT",
    "lost answer": "a PUT is done, and the connection is closed before the answer",
    "stale list": "the answer to a list is an older one to the same request",
    "wrong bytes got": "one bit of an object differs in the answer",
    "wrong bytes put": "one bit of an object differs in the request",
    "rotten object": "one bit of an object differs in the store",
    "refused 409": "a conditional PUT is refused with 409, and nothing is done",
    "refused 412": "a conditional PUT is refused with 412, although there is no such object",
}
ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
CODES = {"503": "SlowDown", "409": "ConditionalRequestConflict", "412": "PreconditionFailed"}
SIGNED_ANEW = ("authorization", "content-md5", "x-amz-content-sha256", "x-amz-date", "x-amz-sdk-checksum-algorithm")


class FaultyStore:
    """A context manager that runs the proxy on `port`. counts: faults by kind.

    rate: the share of requests that get a fault. kinds: the kinds to draw from. Both may be changed at any time.
    """

    def __init__(
        self, store: Bucket, seed: int = 0, rate: float = 0.0, kinds: Sequence[str] = tuple(KINDS), slow_s: float = 0.5
    ) -> None:
        self.store, self.rate, self.kinds, self.slow_s = store, rate, kinds, slow_s
        self.counts: Counter[str] = Counter()
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._lists: dict[str, list[bytes]] = {}

    def __enter__(self) -> FaultyStore:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._front.daemon_threads = True
        self.port = int(self._front.server_address[1])
        self._thread = threading.Thread(target=self._front.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._front.shutdown()
        self._front.server_close()
        self._thread.join()

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables with which any S3 client reaches the store through the proxy."""
        return self.store.settings_at(self.port)

    def fault(self, possible: Sequence[str]) -> tuple[str, float]:
        """Draw the kind for a request, or "", and a number in [0, 1) for its position; count the kind."""
        with self._lock:
            chosen = [kind for kind in self.kinds if kind in possible]
            kind = self._draw.choice(chosen) if chosen and self._draw.random() < self.rate else ""
            self.counts.update([kind] if kind else [])
            return kind, self._draw.random()

    def older_list(self, request: str) -> bytes | None:
        """Return an answer to the same request that differs from the newest one."""
        with self._lock:
            answers = self._lists.get(request, [])
            return self._draw.choice(answers[:-1]) if len(answers) > 1 else None

    def keep_list(self, request: str, answer: bytes) -> None:
        with self._lock:
            answers = self._lists.setdefault(request, [])
            if answer not in answers[-1:]:
                answers.append(answer)
                del answers[:-8]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyStore

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a client that was killed
            super().handle()

    def _answer_any(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        is_put = self.command == "PUT"
        is_list = self.command == "GET" and "list-type" in query
        is_object = self.command == "GET" and not is_list and urlsplit(self.path).path.strip("/").count("/") > 0
        older = self.proxy.older_list(self.path) if is_list else None
        possible = ["503", "slow"]
        possible += ["cut put", "lost answer", "wrong bytes put", "rotten object"] if is_put else []
        possible += ["refused 409", "refused 412"] if is_put and "If-None-Match" in self.headers else []
        possible += ["stale list"] if older is not None else []
        possible += ["wrong bytes got"] if is_object else []
        kind, where = self.proxy.fault(possible)
        body = self._body()
        if kind in ("503", "refused 409", "refused 412"):
            status = kind.split()[-1]
            self._send(int(status), [], ERROR.format(code=CODES[status]).encode())
            return
        if kind == "cut put":
            self._ask(body[: len(body) // 2], is_whole=False)
            self._cut()
            return
        if kind in ("wrong bytes put", "rotten object"):
            body = _flipped(body, where)
        try:
            status, headers, content = self._ask(body, is_signed_anew=kind == "rotten object")
        except (OSError, http.client.HTTPException):  # the server ends
            self._cut()
            return
        if is_list and status == 200:
            self.proxy.keep_list(self.path, content)
        if kind == "lost answer":
            self._cut()
            return
        if kind == "slow":
            time.sleep(self.proxy.slow_s)
        if kind == "wrong bytes got" and status in (200, 206):
            content = _flipped(content, where)
        if kind == "stale list":
            content = older or b""
        self._send(status, headers, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer_any  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _ask(
        self, body: bytes, is_whole: bool = True, is_signed_anew: bool = False
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Forward the request; return status, headers and body of the answer. A body that was cut is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.store.port, timeout=60)
        skipped = {"connection", "expect", "transfer-encoding", "content-length"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        if is_signed_anew:
            headers = self._signed(headers, body)
        length = len(body) if is_whole else int(self.headers.get("Content-Length", 2 * len(body) + 1))
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(length))
            connection.endheaders(body)
            if not is_whole:
                return 0, [], b""
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _signed(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        """Return headers with which the server takes the changed body for the right one."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in SIGNED_ANEW and not name.lower().startswith("x-amz-checksum-")
        }
        kept["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{self.path}", headers=kept, data=body)
        S3SigV4Auth(self.proxy.store.credentials, "s3", REGION).add_auth(request)
        return dict(request.headers.items())

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        skipped = {"transfer-encoding", "connection"} | ({"content-length"} if self.command != "HEAD" else set())
        with suppress(OSError):  # the client is gone
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in skipped:
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


def _flipped(content: bytes, where: float) -> bytes:
    """Return the bytes with one bit flipped, at a position in [0, 1); empty bytes unchanged."""
    if not content:
        return content
    bit = int(where * 8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
