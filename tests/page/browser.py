"""Headless Chromium, driven by the DevTools protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import websockets

CHROMIUM = shutil.which("chromium")
PATIENCE_S = 60.0


class Browser:
    """One tab. ``errors`` are messages of its console that are errors, ``hosts`` all that it asked."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listeners: defaultdict[str, list[Callable[[dict[str, Any]], None]]] = defaultdict(list)
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb",
            f"--user-data-dir={self._profile}", "--remote-debugging-port=0", "about:blank",
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        marker = b"DevTools listening on "
        async with asyncio.timeout(PATIENCE_S):
            while marker not in (line := await self._process.stderr.readline()):
                assert line, "chromium ended"
        self._draining = asyncio.create_task(self._process.stderr.read())
        address = line.split(marker)[1].decode().strip()
        self._socket = await websockets.connect(address, max_size=None)
        self._reading = asyncio.create_task(self._read())
        self._session: str | None = None
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._listeners["Runtime.consoleAPICalled"].append(self._console)
        self._listeners["Runtime.exceptionThrown"].append(
            lambda event: self.errors.append(json.dumps(event["exceptionDetails"])[:500])
        )
        self._listeners["Log.entryAdded"].append(self._entry)
        self._listeners["Network.requestWillBeSent"].append(
            lambda event: self.requested.append(event["request"]["url"])
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call("Browser.close")
        await self._process.wait()
        self._reading.cancel()
        self._draining.cancel()
        await self._socket.close()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps(message))
        async with asyncio.timeout(PATIENCE_S):
            result: dict[str, Any] = await answer
        return result

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, patience_s: float = PATIENCE_S) -> Any:
        """Poll an expression until it is true, and return its value."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while not (value := await self.run(script)):
            assert asyncio.get_running_loop().time() < deadline, f"not true: {script}"
            await asyncio.sleep(0.05)
        return value

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        taken = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(taken["data"])

    async def _read(self) -> None:
        async for raw in self._socket:
            message = json.loads(raw)
            if (number := message.get("id")) is not None:
                answer = self._answers.pop(number)
                if answer.cancelled():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(f"{message['error']}"))
                else:
                    answer.set_result(message["result"])
            else:
                for listener in self._listeners[message["method"]]:
                    listener(message["params"])

    def _console(self, event: dict[str, Any]) -> None:
        if event["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(event["args"])[:500])

    def _entry(self, event: dict[str, Any]) -> None:
        if event["entry"]["level"] == "error":
            self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
