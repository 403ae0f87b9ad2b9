"""Real processes whose controller decides by the load that a client makes, and what came of its requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec

from serve.journal import Line, Round
from store.state import write_atomic
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
        self.replies: list[Reply] = []

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
        due = time.monotonic()
        deadline, since = due + within_s, due
        asked: set[asyncio.Task[None]] = set()
        while time.monotonic() < deadline:
            while due <= time.monotonic():
                asked.add(asyncio.create_task(self.one()))
                due += 1.0 / rate
            found = await self._ready()
            if found != until:
                since = time.monotonic()
            elif time.monotonic() - since > 1.0 and (await self.status())["phase"] in ("steady", "idle"):
                await asyncio.gather(*asked)
                return since
            await asyncio.sleep(0.1)
        raise AssertionError(f"not {until} but {found} within {within_s} s: {await self.status()}")

    async def _ready(self) -> dict[str, int]:
        """Ready replicas by shape; nothing of a controller that is away."""
        try:
            return dict(Counter(replica["shape"] for replica in (await self.replicas_ready()).values()))
        except httpx.HTTPError:
            return {}

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

    def rounds(self) -> list[Round]:
        """The decisions in its journal, oldest first."""
        return [line for line in self.lines() if isinstance(line, Round)]

    def check_replies(self) -> None:
        """No request has failed, and no stream was cut."""
        wrong = [reply for reply in self.replies if reply.status != 200 or reply.error is not None]
        assert not wrong, [(reply.status, reply.error) for reply in wrong[:5]]
        assert all(reply.whole and not reply.cut for reply in self.replies)

    async def one(self) -> None:
        """A stream, kept with what came of it."""
        client = await self.post(MODEL, stream=True, max_tokens=TOKENS, ignore_eos=True)
        self.replies.append(await client.end())
        self.clients.remove(client)
