"""Headless Chromium for tests of pages."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of headless Chromium, driven through the DevTools protocol over a pipe."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (commands, answers)]  # clear of 3 and 4, used below

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
        places = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        self._process = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            os.environ,
            file_actions=[*places, quiet],
            setpgroup=0,
        )
        for end in (commands, answers, *high):
            os.close(end)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=2000, height=1900, deviceScaleFactor=1, mobile=False)
        key = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"  # MLflow's chat panel stays closed
        closed = f"location.protocol === 'http:' && localStorage.setItem('{key}', 'true')"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=closed)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._answers], [], [], 120)[0], f"no answer to {method}"
                self._buffer += os.read(self._answers, 1 << 20)
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            self._listen(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _listen(self, event: dict[str, Any]) -> None:
        """Record errors of the page: on the console, exceptions, failed requests."""
        method, params = event.get("method"), event.get("params", {})
        if (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and params["type"] == "error")
            or (method == "Log.entryAdded" and params["entry"]["level"] == "error")
            or method == "Network.loadingFailed"
        ):
            self.complaints.append(json.dumps(params))

    def cut_off(self) -> None:
        """Disconnect the page from the network."""
        self.call("Network.enable")
        self.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")
        while self.evaluate("location.href + document.readyState") != "about:blankcomplete":
            time.sleep(0.05)  # a second navigation during the first is sometimes never answered
        self.call("Page.navigate", url=address)

    def wait_for(self, *texts: str, pictures: int = 0, timeout_s: float = 120) -> str:
        """Return the visible text of the page once it is loaded and contains all of `texts` and as many pictures of
        500 pixels."""
        seen = "Array.from(document.images).filter(i => i.complete && i.naturalWidth >= 500).length"
        until = time.monotonic() + timeout_s
        while True:
            text = str(self.evaluate("document.body ? document.body.innerText : ''"))
            missing = [each for each in texts if each not in text]
            count, is_loaded = self.evaluate(seen), self.evaluate("document.readyState") == "complete"
            if not missing and count >= pictures and is_loaded:
                return text
            assert time.monotonic() < until, f"missing {missing}, {count} pictures; the page says: {text[-3000:]}"
            time.sleep(0.2)

    def click(self, text: str) -> None:
        """Click the first link, tab or button that begins with this text, once its position is stable: content loaded
        above it moves it."""
        found = (
            "(() => { const all = [...document.querySelectorAll('a, button, [role=tab], [role=button]')];"
            f"const it = all.find(e => e.innerText && e.innerText.trim().startsWith({json.dumps(text)}));"
            "it.scrollIntoView({block: 'center'});"
            "const box = it.getBoundingClientRect();"
            "return JSON.stringify([box.x + box.width / 2, box.y + box.height / 2]); })()"
        )
        self.wait_for(text)
        place, before = self.evaluate(found), None
        while place != before:
            time.sleep(0.5)
            place, before = self.evaluate(found), place
        self._press(*json.loads(place))

    def _press(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def slide_to_end(self) -> None:
        """Click the right end of the first slider on the page, which selects its last step."""
        root = "document.querySelector('[role=slider]').parentElement.parentElement.getBoundingClientRect()"
        box = json.loads(self.evaluate(f"JSON.stringify({root})"))
        self._press(box["right"] - 2, box["y"] + box["height"] / 2)

    def screenshot(self, path: Path) -> None:
        time.sleep(1.0)  # charts are drawn after their titles
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._answers)
