"""Shared calls in one process: which requests share, their answers, and disconnects."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from gateway.intake.usage_journal import UsageCharge
from gateway.protocol import body as bodies
from gateway.protocol.body_batching import sub_request_of
from gateway.protocol.errors import Refused
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES
from gateway.protocol.usage import TokenUsage
from gateway.queue.dynamic_batching import DynamicBatcher
from gateway.request_context import RequestContext
from gateway.routing.fleet import ServedModel
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from gateway.telemetry.traces.request_trace import RequestTrace, TracedAttempt
from policy.config.deployment import CoalesceConfig
from policy.errors import Refusal
from policy.request import Request
from policy.tenancy.price import FREE
from tests.gateway.worker import until

ROUTE = ROUTES["/v1/embeddings"]
SERVED = ServedModel("vectors")


class Site:
    """A coalescer in front of a fake engine: ``sent`` are the inputs that reached it."""

    def __init__(self, **bounds: Any) -> None:
        self.metrics = WorkerMetrics()
        self.logged = io.StringIO()
        self.coalescer = DynamicBatcher(
            self._deliver, self.metrics, StructuredLog(0, self.logged), JsonPieceReader()
        )
        self.journal: Any = SimpleNamespace(take=lambda charge: False)
        self.bounds = CoalesceConfig(**{"window_s": 0.02, **bounds})
        self.sent: list[list[str]] = []
        self.requests: list[Request] = []
        self.clients: list[weakref.ref[object]] = []
        self.aborted: list[list[str]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.refuse: Callable[[list[str]], Awaitable[bytes | None]] = self._nothing

    async def _nothing(self, inputs: list[str]) -> bytes | None:
        return None

    async def _deliver(
        self, call: RequestContext, served: ServedModel, request: Request, body: bodies.RequestBody,
        raw: bytes,
    ) -> None:  # fmt: skip
        inputs = json.loads(raw)["input"]
        inputs = [inputs] if isinstance(inputs, str) else inputs
        self.sent.append(inputs)
        assert call.trace is not None
        call.trace.begin(TracedAttempt(0.0, 0.0, b"r1"))
        self.requests.append(request)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.aborted.append(inputs)
            raise
        answer = await self.refuse(inputs)
        if answer is None:
            data = [{"index": i, "embedding": text} for i, text in enumerate(inputs)]
            body = {"id": f"embd-{call.upstream_id.decode()}", "data": data, "usage": {"prompt_tokens": 8}}
            answer = json.dumps(body).encode()
        call.replica = b"r1"
        call.outcome = "ok"
        call.usage = TokenUsage(prompt=8)
        await call.answer(200, [(b"content-type", b"application/json")], answer)

    def ask(self, *inputs: str, deadline: float = 9e9) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.ask_here(*inputs, deadline=deadline))

    async def ask_here(self, *inputs: str, deadline: float = 9e9) -> dict[str, Any]:
        """As :meth:`ask`, in the task that calls it."""
        raw = json.dumps(
            {"model": "vectors", "input": list(inputs) if len(inputs) > 1 else inputs[0]}
        ).encode()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        self.clients.append(weakref.ref(send))
        call = RequestContext(ROUTE, {"headers": []}, receive, send)
        call.charge = UsageCharge(self.journal, "t", "k", "vectors", "", FREE, len(raw))
        call.trace = RequestTrace(b"1" * 32, b"", 1, sampled=True)
        body = bodies.read(raw)
        request = Request("vectors", prompt_tokens=len(raw), size=len(raw), deadline=deadline)
        share = sub_request_of(ROUTE, body, raw, "", self.bounds)
        assert share is not None

        async def alone() -> None:
            await self._deliver(call, SERVED, request, body, raw)

        await self.coalescer.serve(share, call, SERVED, request, bounds=self.bounds, alone=alone)
        head, answer = sent
        received: dict[str, Any] = json.loads(answer["body"])
        received["own"] = received["id"] == f"embd-{call.upstream_id.decode()}"
        received["texts"] = [item["embedding"] for item in received["data"]]
        received["indices"] = [item["index"] for item in received["data"]]
        received["headers"] = dict(head["headers"])
        received["outcome"] = call.outcome
        charge = call.charge
        received["charged"] = charge.prompt if charge.ended and not charge.estimated else None
        received["attempts"] = len(call.trace.attempts)
        return received


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def held(*texts: str, **bounds: Any) -> tuple[Site, list[asyncio.Task[dict[str, Any]]]]:
    """Requests of which the first is sent and the others wait in the window."""
    site = Site(**{"window_s": 1.0, **bounds})
    site.hold.clear()
    asked = [site.ask(text) for text in texts]
    await turn()
    return site, asked


async def check_nothing_is_left(site: Site, last: asyncio.Task[dict[str, Any]]) -> None:
    """The last client disconnects: the next request waits for no call before it."""
    last.cancel()
    await turn()
    before = len(site.sent)
    again = site.ask("again")
    await turn()
    assert site.sent[before:] == [["again"]]
    again.cancel()
    await turn()


async def test_a_lone_request_is_sent_unchanged() -> None:
    site = Site(window_s=1.0)
    for text in ("a", "b"):
        received = await site.ask(text)
        assert (received["texts"], received["own"], received["outcome"]) == ([text], True, "ok")
    assert site.sent == [["a"], ["b"]]


async def test_a_request_is_freed_without_a_collection() -> None:
    site = Site(window_s=1.0)
    gc.disable()
    try:
        await site.ask("a")
        assert [client() for client in site.clients] == [None]
    finally:
        gc.enable()


async def test_concurrent_requests_share_a_call_and_get_their_own_answers() -> None:
    site, asked = await held("a")
    asked += [site.ask("b", "c"), site.ask("d")]
    await turn()
    assert site.sent == [["a"]]
    site.hold.set()
    answers = await asyncio.gather(*asked)
    assert site.sent == [["a"], ["b", "c", "d"]]
    assert [received["texts"] for received in answers] == [["a"], ["b", "c"], ["d"]]
    used = [received["usage"]["prompt_tokens"] for received in answers[1:]]
    assert sum(used) == 8
    assert [received["charged"] for received in answers] == [None, *used], "each is charged its own part"
    assert [received["indices"] for received in answers] == [[0], [0, 1], [0]]
    assert all(received["own"] and received["attempts"] == 1 for received in answers)
    assert answers[1]["usage"]["prompt_tokens"] + answers[2]["usage"]["prompt_tokens"] == 8
    assert all(received["headers"][b"content-type"] == b"application/json" for received in answers)
    assert answers[1]["headers"][b"x-tidegate-replica"] == b"r1"
    meter = site.metrics.model("vectors")
    assert (meter.coalesced_calls, meter.coalesced_requests) == (1, 2)
    assert meter.totals.input_tokens == 8  # of the two, without a usage of their own


async def test_a_window_ends_during_the_previous_call() -> None:
    site, asked = await held("a", "b", "c", window_s=0.001)
    await until(lambda: len(site.sent) == 2)
    assert site.sent[1] == ["b", "c"]
    site.hold.set()
    await asyncio.gather(*asked)


async def test_only_the_failing_member_gets_an_error() -> None:
    site, asked = await held("a", "b", "bad", "c")

    async def refuse(inputs: list[str]) -> bytes | None:
        if "bad" in inputs:
            raise Refused(Refusal.BAD_REQUEST, "bad input")
        return None

    site.refuse = refuse
    site.hold.set()
    _, one, guilty, other = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(guilty, Refused)
    assert guilty.message == "bad input"
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    assert (one["texts"], other["texts"]) == (["b"], ["c"])
    assert site.sent == [["a"], ["b", "bad", "c"], ["b"], ["bad"], ["c"]]
    assert site.logged.getvalue() == ""


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data":[]}', b"\xff", b'{"data":[{"index":0}]}'])
async def test_members_are_sent_one_by_one_if_the_answer_cannot_be_split(answer: bytes) -> None:
    site, asked = await held("a", "b", "c")

    async def undecodable(inputs: list[str]) -> bytes | None:
        return answer if len(inputs) > 1 else None

    site.refuse = undecodable
    site.hold.set()
    assert [received["texts"] for received in await asyncio.gather(*asked)] == [["a"], ["b"], ["c"]]
    assert site.metrics.model("vectors").coalesced_calls == 0
    logged = json.loads(site.logged.getvalue())
    assert (logged["event"], logged["requests"], bool(logged["traceback"])) == ("shared_call_failed", 2, True)


async def test_a_disconnect_removes_a_request_from_the_window() -> None:
    site, asked = await held("a", "b", "c")
    asked[1].cancel()
    await turn()
    site.hold.set()
    assert (await asked[2])["texts"] == ["c"]
    assert site.sent == [["a"], ["c"]]


async def test_a_shared_call_is_cancelled_when_all_clients_disconnected() -> None:
    site, asked = await held("a", "b", "c", "d", max_inputs=3)
    assert site.sent == [["a"], ["b", "c", "d"]]
    asked[1].cancel()
    asked[2].cancel()
    await turn()
    assert site.aborted == []
    asked[3].cancel()
    await turn()
    assert site.aborted == [["b", "c", "d"]]
    await check_nothing_is_left(site, asked[0])


@pytest.mark.parametrize("texts", ["abc", "ab"])
async def test_all_clients_may_disconnect_before_the_shared_call_begins(texts: str) -> None:
    site, asked = await held(*texts)
    for task in asked[1:]:
        task.cancel()
    for due in site.coalescer._windows.due(9e9):  # in the same turn of the loop
        site.coalescer._depart(due)
    await turn()
    assert site.sent == [["a"]]
    await check_nothing_is_left(site, asked[0])


async def test_a_disconnect_ends_a_call_that_is_not_shared() -> None:
    site, (first, second) = await held("a", "b")
    first.cancel()
    await turn()
    # Nothing is under way any more, so the second does not wait.
    assert site.aborted == [["a"]]
    assert site.sent == [["a"], ["b"]]
    await check_nothing_is_left(site, second)


async def test_a_disconnect_as_the_turn_comes_ends_a_call_that_did_not_begin() -> None:
    site = Site(window_s=1.0)
    site.hold.clear()

    async def ask_and_leave_for_the_next() -> dict[str, Any]:
        received = await site.ask_here("a")
        second.cancel()  # it has its turn, and has not run since
        return received

    first = asyncio.create_task(ask_and_leave_for_the_next())
    await turn()
    second = site.ask("b")
    await turn()
    site.hold.set()
    await turn()
    assert second.cancelled()
    assert site.sent == [["a"]]
    await check_nothing_is_left(site, first)


async def test_the_shared_call_is_the_sum_of_its_members() -> None:
    site, asked = await held("a", max_inputs=2)
    asked += [site.ask("bb", deadline=7.0), site.ask("ccc", deadline=5.0)]
    await turn()
    shared = site.requests[1]
    own = [len(json.dumps({"model": "vectors", "input": text})) for text in ("bb", "ccc")]
    assert shared.prompt_tokens == sum(own)
    assert shared.deadline == 5.0
    assert shared.size > sum(own)
    assert (shared.avoid, shared.begun) == (set(), 1)
    site.hold.set()
    await asyncio.gather(*asked)


async def test_members_of_a_call_that_killed_a_replica_have_one_attempt_left() -> None:
    site, asked = await held("a", "b", "c")

    async def die(inputs: list[str]) -> bytes | None:
        if len(inputs) > 1:
            site.requests[-1].avoid.add("r1")
            site.requests[-1].begun += 1
            raise Refused(Refusal.REPLICA_LOST, "lost")
        return None

    site.refuse = die
    site.hold.set()
    await asyncio.gather(*asked)
    assert [(request.avoid, request.begun) for request in site.requests[2:]] == [({"r1"}, 1)] * 2
