"""Real processes whose controller decides by the load that a client makes, and what came of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from serve.autoscaler.journal import DecisionRound, Line
from serve.state.targets import Target
from store.state_dir import write_atomic
from tests.faults.live import MODEL, Live
from tests.faults.raw_client import Reply

# Of a stream: short, so that many come and go while a count changes.
TOKENS = 16


class Scaled(Live):
    """A stand with one model of which the test says all but its name and engine."""

    def __init__(self, root: Path, spec: dict[str, Any], **sections: Any) -> None:
        super().__init__(root, {"queue_timeout_s": 60})
        self.models = [{"name": MODEL, "engine": "sim", **spec}]
        self.sections = sections
        self.headers: dict[str, str] = {}
        self.replies: list[Reply] = []
        self.looks: list[Counter[tuple[int, str]]] = []

    def write_document(self) -> None:
        super().write_document()
        path = self.root / "deployment.json"
        written = msgspec.json.decode(path.read_bytes()) | self.sections
        write_atomic(path, msgspec.json.encode(written))

    async def start(self) -> None:
        """Until a request would be served, or would wake the model."""
        await self.start_controller()
        await self.start_worker()

    async def load(self, rate: float, until: dict[str, int], within_s: float) -> float:
        """Send ``rate`` requests per second, evenly, until so many replicas of each shape are ready.

        And no others, for a second. Returns when that was; the requests that are under way go on.
        """
        async with self.under(rate):
            return await self.rest(until, within_s)

    @contextlib.asynccontextmanager
    async def under(self, rate: float) -> AsyncIterator[None]:
        """Send ``rate`` requests per second, evenly, and at the end wait for what is under way."""
        asked: set[asyncio.Task[None]] = set()

        async def send() -> None:
            due = time.monotonic()
            while True:
                while due <= time.monotonic():
                    asked.add(asyncio.create_task(self.one()))
                    due += 1.0 / rate
                await asyncio.sleep(0.1)

        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            sending.cancel()
        await asyncio.gather(*asked)

    async def rest(self, until: dict[str, int], within_s: float) -> float:
        """Wait until so many replicas of each shape are ready, and no others, for a second.

        Returns since when.
        """
        since = time.monotonic()
        deadline = since + within_s
        found: dict[str, int] = {}
        while time.monotonic() < deadline:
            # A controller that is away says nothing.
            with contextlib.suppress(httpx.HTTPError):
                replicas = (await self.tell("GET", "/fleet"))["replicas"]
                self.looks.append(Counter((one["generation"], one["state"]) for one in replicas))
                found = dict(Counter(one["shape"] for one in replicas if one["state"] == "ready"))
                if found != until:
                    since = time.monotonic()
                elif time.monotonic() - since > 1.0 and (await self.status())["phase"] in ("steady", "idle"):
                    return since
            await asyncio.sleep(0.1)
        raise AssertionError(f"not {until} but {found} within {within_s} s: {await self.status()}")

    async def until_phase(self, phase: str, within_s: float) -> dict[str, Any]:
        """Wait until the model is in its ``phase``; returns its status then."""
        deadline = time.monotonic() + within_s
        while (status := await self.status())["phase"] != phase:
            assert time.monotonic() < deadline, f"not {phase} within {within_s} s: {status}"
            await asyncio.sleep(0.01)
        return status

    async def kill_in(self, phase: str, within_s: float) -> float:
        """Kill the controller in a ``phase`` and start another one; returns since when it has had its aim."""
        await self.until_phase(phase, within_s)
        return await self.kill()

    async def kill(self) -> float:
        """Kill the controller and start another one; returns since when it has had its aim."""
        await self.end_controller(signal.SIGKILL)
        since = self.target().since
        await self.start_controller()
        return since

    def target(self) -> Target:
        """What the controller steers for, as it would find it again."""
        return msgspec.json.decode(self.state.targets_path.read_bytes(), type=dict[str, Target])[MODEL]

    async def apply(self) -> dict[str, Any]:
        """Apply the document as it is now; returns what is said of the model then."""
        self.write_document()
        document = (self.root / "deployment.json").read_bytes()
        return dict((await self.tell("POST", "/apply", msgspec.json.decode(document)))["models"][0])

    async def status(self) -> dict[str, Any]:
        """What the controller says of the model."""
        return dict((await self.tell("GET", "/status"))["models"][0])

    async def events(self) -> list[str]:
        """What it says has happened."""
        return list((await self.tell("GET", "/status"))["events"])

    def lines(self) -> list[Line]:
        """Its journal, oldest first."""
        text = (self.root / "decisions.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Line) for line in text]

    def rounds(self) -> list[DecisionRound]:
        """The decisions in its journal, oldest first."""
        return [line for line in self.lines() if isinstance(line, DecisionRound)]

    def check_replies(self) -> None:
        """No request has failed, and no stream was cut."""
        wrong = [reply for reply in self.replies if reply.status != 200 or reply.error is not None]
        assert not wrong, [(reply.status, reply.error) for reply in wrong[:5]]
        assert all(reply.whole and not reply.cut for reply in self.replies)

    async def one(self) -> None:
        """A stream, kept with what came of it."""
        await self.stream(TOKENS)

    async def stream(self, tokens: int) -> None:
        """A stream of so many tokens, kept with what came of it."""
        client = await self.post(MODEL, headers=self.headers, stream=True, max_tokens=tokens, ignore_eos=True)
        self.replies.append(await client.end())
        self.clients.remove(client)


Making = Callable[..., Awaitable[Scaled]]
