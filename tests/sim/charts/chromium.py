"""A real browser over a pipe: no server, no port, no dependency but chromium."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWERS_S = 60.0


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page of a headless browser with the profile directory ``home``."""

    def __init__(self, program: str, home: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # It reads from 3 and writes to 4, which may be anything here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, ours)]
        words = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={home}",
                 "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
                 "--no-first-run", "--hide-scrollbars"]  # fmt: skip
        if os.geteuid() == 0:  # it refuses to start as root otherwise
            words.append("--no-sandbox")
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *words],  # noqa: S607
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs, ours, *ends):
            os.close(end)
        self._poll = select.poll()  # select() takes no descriptor above 1,023
        self._poll.register(self._from, select.POLLIN)
        self._asked, self._rest, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        message: dict[str, Any] = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._asked:
            self._events.append(answer)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int = 1400, height: int = 1000, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not self._of("Page.loadEventFired"):
            self._events.append(self._read())

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def requested(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self._of("Network.requestWillBeSent")]

    def complaints(self) -> list[dict[str, Any]]:
        return self._of("Log.entryAdded") + self._of("Runtime.exceptionThrown")

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(ANSWERS_S)
        os.close(self._to)
        os.close(self._from)

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = self._poll.poll(1000 * ANSWERS_S)
            chunk = os.read(self._from, 1 << 20) if ready else b""
            assert chunk, "the browser says nothing any more"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
