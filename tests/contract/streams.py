"""Clients with streams of many lengths, and what they saw of a switch of modes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tests.e2e.stack import Stack


@dataclass
class Stream:
    """One request: its replica, when its first and last event came, and what was wrong with it."""

    replica: str = ""
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    problem: str = ""


@dataclass
class Streams:
    """Clients that each send one stream after the other.

    The numbers of tokens are those of ``lengths``, each once in as many streams in a row, in random order.
    A client waits until ``every_s`` seconds have passed since another one began, which may change meanwhile.
    """

    stack: Stack
    model: str
    lengths: tuple[int, ...]
    clients: int = 12
    every_s: float = 0.0
    ended: list[Stream] = field(default_factory=list)

    def __enter__(self) -> Streams:
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._next = self._shuffled()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    @property
    def problems(self) -> list[str]:
        """One line per failed request."""
        return [f"{stream.replica}: {stream.problem}" for stream in self.ended if stream.problem]

    def gap_s(self, since: float, until: float) -> float:
        """The longest time between ``since`` and ``until`` in which no stream ran and none began."""
        busy = sorted((s.first, s.last) for s in self.ended if s.first and s.last > since and s.first < until)
        longest, quiet = 0.0, since
        for first, last in busy:
            longest, quiet = max(longest, first - quiet), max(quiet, last)
        return longest

    def _shuffled(self) -> Iterator[int]:
        """The lengths, again and again, each time in another order."""
        draw = random.Random(1)  # noqa: S311 - no secret
        while True:
            yield from draw.sample(self.lengths, len(self.lengths))

    def _client(self, number: int) -> None:
        with httpx.Client(base_url=self.stack.base_url, timeout=600, trust_env=False) as client:
            while (tokens := self._begins()) is not None:
                stream = Stream(sent=time.time())
                try:
                    self._run(client, stream, tokens, f"{number} {len(self.ended)}")
                except httpx.HTTPError as error:
                    stream.problem = repr(error)
                self.ended.append(stream)

    def _begins(self) -> int | None:
        """Wait for the client's turn; the length of its stream, ``None`` in the end."""
        with self._turn:
            return None if self._stop.wait(self.every_s) else next(self._next)

    def _run(self, client: httpx.Client, stream: Stream, tokens: int, prompt: str) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": True}
        with client.stream("POST", "/completions", json=body) as answer:
            stream.replica = answer.headers.get("x-tidegate-replica", "")
            text = ""
            for line in answer.iter_lines():
                if line.startswith("data: ") and answer.status_code == 200:
                    stream.last = time.time()
                    stream.first = stream.first or stream.last
                    text = text if line == "data: [DONE]" else line
                    ended = line == "data: [DONE]"
                elif line and not line.startswith(":"):
                    text, ended = line, False
        if answer.status_code != 200:
            stream.problem = f"{answer.status_code} {text[:300]}"
        elif not ended or "error" in (last := json.loads(text.removeprefix("data: "))):
            stream.problem = f"cut after {stream.last - stream.sent:.1f} s: {text[:300]}"
        elif last["choices"][0]["finish_reason"] != "length":
            stream.problem = f"finish_reason: {text[:300]}"
