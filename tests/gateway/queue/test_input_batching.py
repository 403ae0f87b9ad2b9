"""Shared calls in one process: who shares, who is told what, and who may leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from gateway.protocol import body as bodies
from gateway.protocol.batched_body import sub_request_of
from gateway.protocol.errors import Refused
from gateway.protocol.paths import ROUTES
from gateway.protocol.usage import Usage
from gateway.queue.input_batching import Coalescer, _Inbox
from gateway.request_context import Call
from gateway.routing.fleet import ServedModel
from gateway.telemetry.metrics import Metrics
from policy.config.deployment import Coalesce
from policy.errors import Refusal
from policy.request import Request
from policy.types import Runner
from tests.gateway.worker import until
from tests.serve.sim_driver import client_of, engine_of, spec

ROUTE = ROUTES["/v1/embeddings"]
SERVED = ServedModel("vectors")


class Site:
    """A coalescer before an engine that the test plays: ``sent`` are the bodies that reached it."""

    def __init__(self, **bounds: Any) -> None:
        self.metrics = Metrics()
        self.coalescer = Coalescer(self._deliver, self.metrics)
        self.bounds = Coalesce(**{"window_s": 0.02, **bounds})
        self.sent: list[list[str]] = []
        self.requests: list[Request] = []
        self.aborted: list[list[str]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.refuse: Callable[[list[str]], Awaitable[bytes | None]] = self._nothing

    async def _nothing(self, inputs: list[str]) -> bytes | None:
        return None

    async def _deliver(
        self, call: Call, served: ServedModel, request: Request, body: bodies.Body, raw: bytes
    ) -> None:
        inputs = json.loads(raw)["input"]
        inputs = [inputs] if isinstance(inputs, str) else inputs
        self.sent.append(inputs)
        self.requests.append(request)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.aborted.append(inputs)
            raise
        answer = await self.refuse(inputs)
        if answer is None:
            data = [{"index": i, "embedding": text} for i, text in enumerate(inputs)]
            said = {"id": f"embd-{call.upstream_id.decode()}", "data": data, "usage": {"prompt_tokens": 8}}
            answer = json.dumps(said).encode()
        call.replica = b"r1"
        call.outcome = "ok"
        call.usage = Usage(prompt=8)
        await call.answer(200, [(b"content-type", b"application/json")], answer)

    def ask(self, *inputs: str, deadline: float = 9e9) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self._ask(list(inputs), deadline))

    async def _ask(self, inputs: list[str], deadline: float) -> dict[str, Any]:
        raw = json.dumps({"model": "vectors", "input": inputs if len(inputs) > 1 else inputs[0]}).encode()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        call = Call(ROUTE, {"headers": []}, receive, send)
        body = bodies.read(raw)
        request = Request("vectors", prompt_tokens=len(raw), size=len(raw), deadline=deadline)
        share = sub_request_of(ROUTE, body, raw, "", self.bounds)
        assert share is not None

        async def alone() -> None:
            await self._deliver(call, SERVED, request, body, raw)

        await self.coalescer.serve(share, call, SERVED, request, bounds=self.bounds, alone=alone)
        head, answer = sent
        said: dict[str, Any] = json.loads(answer["body"])
        said["own"] = said["id"] == f"embd-{call.upstream_id.decode()}"
        said["texts"] = [item["embedding"] for item in said["data"]]
        said["indices"] = [item["index"] for item in said["data"]]
        said["headers"] = dict(head["headers"])
        said["outcome"] = call.outcome
        return said


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def held(*texts: str, **bounds: Any) -> tuple[Site, list[asyncio.Task[dict[str, Any]]]]:
    """Requests that have come, the first of which is upstream while the others wait for company."""
    site = Site(**{"window_s": 1.0, **bounds})
    site.hold.clear()
    asked = [site.ask(text) for text in texts]
    await turn()
    return site, asked


async def leave_nothing(site: Site, last: asyncio.Task[dict[str, Any]]) -> None:
    """The last one leaves, and the coalescer has forgotten all."""
    last.cancel()
    await turn()
    assert not site.coalescer._windows._groups
    assert not site.coalescer._calls


async def test_who_is_alone_goes_as_it_came() -> None:
    site = Site(window_s=1.0)
    for text in ("a", "b"):
        said = await site.ask(text)
        assert (said["texts"], said["own"], said["outcome"]) == ([text], True, "ok")
    assert site.sent == [["a"], ["b"]]


async def test_those_who_come_together_share_a_call_and_get_their_own() -> None:
    site, asked = await held("a")
    asked += [site.ask("b", "c"), site.ask("d")]
    await turn()
    assert site.sent == [["a"]]
    site.hold.set()
    answers = await asyncio.gather(*asked)
    assert site.sent == [["a"], ["b", "c", "d"]]
    assert [said["texts"] for said in answers] == [["a"], ["b", "c"], ["d"]]
    assert [said["indices"] for said in answers] == [[0], [0, 1], [0]]
    assert all(said["own"] for said in answers)
    assert answers[1]["usage"]["prompt_tokens"] + answers[2]["usage"]["prompt_tokens"] == 8
    assert all(said["headers"][b"content-type"] == b"application/json" for said in answers)
    assert answers[1]["headers"][b"x-tidegate-replica"] == b"r1"
    meter = site.metrics.model("vectors")
    assert (meter.coalesced_calls, meter.coalesced_requests) == (1, 2)
    assert meter.totals.input_tokens == 8  # of the two, who have no usage of their own to count


async def test_the_window_ends_while_the_call_before_is_under_way() -> None:
    site, asked = await held("a", "b", "c", window_s=0.001)
    await until(lambda: len(site.sent) == 2)
    assert site.sent[1] == ["b", "c"]
    site.hold.set()
    await asyncio.gather(*asked)


async def test_only_the_guilty_gets_its_error() -> None:
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


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data":[]}', b"\xff", b'{"data":[{"index":0}]}'])
async def test_an_answer_that_cannot_be_split_is_asked_for_one_by_one(answer: bytes) -> None:
    site, asked = await held("a", "b", "c")

    async def nonsense(inputs: list[str]) -> bytes | None:
        return answer if len(inputs) > 1 else None

    site.refuse = nonsense
    site.hold.set()
    assert [said["texts"] for said in await asyncio.gather(*asked)] == [["a"], ["b"], ["c"]]
    assert site.metrics.model("vectors").coalesced_calls == 0


async def test_one_who_leaves_the_window_is_not_sent() -> None:
    site, asked = await held("a", "b", "c")
    asked[1].cancel()
    await turn()
    site.hold.set()
    assert (await asked[2])["texts"] == ["c"]
    assert site.sent == [["a"], ["c"]]


async def test_the_call_goes_on_for_those_who_stay_and_ends_when_all_have_left() -> None:
    site, asked = await held("a", "b", "c", "d", max_inputs=3)
    assert site.sent == [["a"], ["b", "c", "d"]]
    asked[1].cancel()
    asked[2].cancel()
    await turn()
    assert site.aborted == []
    asked[3].cancel()
    await turn()
    assert site.aborted == [["b", "c", "d"]]
    await leave_nothing(site, asked[0])


@pytest.mark.parametrize("texts", ["abc", "ab"])
async def test_all_may_leave_before_their_call_has_begun(texts: str) -> None:
    site, asked = await held(*texts)
    for task in asked[1:]:
        task.cancel()
    for due in site.coalescer._windows.due(9e9):  # in the same turn of the loop
        site.coalescer._depart(due)
    await turn()
    assert site.sent == [["a"]]
    await leave_nothing(site, asked[0])


async def test_one_who_leaves_an_own_call_ends_it() -> None:
    site, (first, second) = await held("a", "b")
    first.cancel()
    await turn()
    # Nothing is under way any more, so the second waits for nobody.
    assert site.aborted == [["a"]]
    assert site.sent == [["a"], ["b"]]
    await leave_nothing(site, second)


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


async def test_who_shared_a_call_that_killed_a_replica_has_one_replica_left_to_try() -> None:
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


words = st.lists(st.sampled_from(["tide", "gate", "sea", "é"]), min_size=1, max_size=3).map(" ".join)
bodies_ = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["base", "sql"]),
        "input": st.one_of(
            words, st.lists(words, min_size=1, max_size=3), st.lists(st.integers(0, 9), min_size=1)
        ),
        "dimensions": st.sampled_from([2, 4, 9999]),  # more than there are: an error of its own
    }
)
arrivals = st.lists(
    st.tuples(bodies_, st.sampled_from(["web", "night"]), st.booleans()), min_size=1, max_size=8
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[httpx.AsyncClient]:
    async with engine_of(spec(runner=Runner.POOLING)) as running, client_of(running) as client:
        yield client


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(arrivals=arrivals)
async def test_whatever_comes_everyone_gets_what_it_would_have_got_alone(
    engine: httpx.AsyncClient, arrivals: list[tuple[dict[str, Any], str, bool]]
) -> None:
    bounds = Coalesce(window_s=0.001, max_inputs=5)
    sent = 0

    async def deliver(
        call: Call, served: ServedModel, request: Request, body: bodies.Body, raw: bytes
    ) -> None:
        nonlocal sent
        sent += 1
        told = await engine.post(ROUTE.path, content=raw, headers={"x-request-id": call.upstream_id.decode()})
        if told.status_code != 200:
            raise Refused(Refusal.BAD_REQUEST, told.text)
        await call.answer(200, [], told.content)

    coalescer = Coalescer(deliver, Metrics())

    async def ask(body: dict[str, Any], tenant: str, together: bool) -> tuple[bytes, Any]:
        inbox = _Inbox()
        call = Call(ROUTE, {"headers": []}, inbox.receive, inbox.send)
        raw = json.dumps(body).encode()
        read = bodies.read(raw)
        request = Request("base", tenant)
        share = sub_request_of(ROUTE, read, raw, tenant, bounds) if together else None
        alone = partial(deliver, call, SERVED, request, read, raw)
        try:
            if share is None:
                await alone()
            else:
                await coalescer.serve(share, call, SERVED, request, bounds=bounds, alone=alone)
        except Refused as refused:
            return call.upstream_id, refused.message
        return call.upstream_id, msgspec.json.decode(inbox.answer())

    tasks = []
    for body, tenant, pause in arrivals:
        tasks.append(asyncio.create_task(ask(body, tenant, True)))
        if pause:
            await asyncio.sleep(0)
    shared = await asyncio.gather(*tasks)
    assert sent <= 2 * len(arrivals)
    for (id_, said), (body, tenant, _) in zip(shared, arrivals, strict=True):
        _, own = await ask(body, tenant, False)
        if isinstance(own, str):
            assert said == own
            continue
        assert said["id"] == f"embd-{id_.decode()}"
        assert {**said, "id": 0, "created": 0, "usage": 0} == {**own, "id": 0, "created": 0, "usage": 0}
        assert set(said["usage"]) == set(own["usage"])
    assert not coalescer._windows._groups
    assert not coalescer._calls
