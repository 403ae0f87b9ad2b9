"""Streams that run during a change: every one must complete."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tests.e2e.stack import Stack

# Until a byte of an answer: it may wait for an engine that starts anew on a busy machine.
PATIENCE_S = 600.0


@dataclass
class Outcome:
    """One request: which replica served it, and what was wrong with it."""

    replica: str
    problem: str
    began: float
    ended: float


@dataclass
class Traffic:
    """Clients that each send one request after the other until the block ends.

    With ``stream`` an answer counts only with a finish_reason and ``[DONE]``, and no error event.
    Each rests ``pause_s`` between two requests: on two cores a replica that starts needs its share.
    """

    stack: Stack
    model: str
    clients: int = 2
    stream: bool = True
    max_tokens: int = 24
    pause_s: float = 1.0
    outcomes: list[Outcome] = field(default_factory=list)
    #: Set when a client has the first event of a stream.
    first_event: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Send no more requests; those in flight finish."""
        self._stop.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)

    @property
    def problems(self) -> list[str]:
        """One line per failed request."""
        return [f"{o.replica}: {o.problem}" for o in self.outcomes if o.problem]

    @property
    def replicas(self) -> set[str]:
        """The replicas that have served, as far as the answers name them.

        The head of a stream that waits longer than ``gateway.sse_keepalive_s`` is sent before its replica is
        chosen.
        """
        return {o.replica for o in self.outcomes if o.replica and not o.problem}

    def _client(self, number: int) -> None:
        with httpx.Client(base_url=self.stack.base_url, timeout=PATIENCE_S, trust_env=False) as client:
            count = 0
            while not self._stop.is_set():
                count += 1
                began = time.time()
                try:
                    replica, problem = self._one(client, f"{number}.{count}")
                except httpx.HTTPError as error:
                    replica, problem = "", repr(error)
                self.outcomes.append(Outcome(replica, problem, began, time.time()))
                self._stop.wait(self.pause_s)

    def _one(self, client: httpx.Client, tag: str) -> tuple[str, str]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Tell me story {tag}."}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": self.stream,
        }
        with client.stream("POST", "/chat/completions", json=body) as answer:
            replica = answer.headers.get("x-tidegate-replica", "")
            text = ""
            for piece in answer.iter_text():
                text += piece
                if text.startswith("data: "):
                    self.first_event.set()
        if answer.status_code != 200:
            return replica, f"{answer.status_code} {text[:300]}"
        if not self.stream:
            reason = json.loads(text)["choices"][0]["finish_reason"]
            return replica, "" if reason == "length" else f"finish_reason {reason}"
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            return replica, f"no [DONE] after {len(events)} events: {text[-300:]}"
        decoded = [json.loads(event) for event in events[:-1]]
        if any("error" in event for event in decoded):
            return replica, f"error event: {decoded[-1]}"
        reasons = [choice["finish_reason"] for event in decoded for choice in event["choices"]]
        return replica, "" if reasons[-1] == "length" else f"finish_reason {reasons[-1]}"
