"""Streams that wait get comments; the first one commits to status 200, and to nothing else."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from gateway.delivery.sse_keepalive import SseKeepalive
from gateway.http.asgi_exchange import SENT
from gateway.protocol.errors import Refused
from gateway.protocol.paths import ROUTES
from gateway.request_context import RequestContext
from policy.errors import Refusal
from tests.gateway.fake_replica import DONE, Exchange, event, stream
from tests.gateway.worker import Stack

COMMENT = b": keep-alive\n\n"
OK = event("a") + event(finish="stop")


def watched(every_s: float, sent: list[Message]) -> tuple[SseKeepalive, RequestContext]:
    """A chat that waits since 100."""

    def send(message: Message) -> Any:
        sent.append(message)
        return SENT

    keepalive = SseKeepalive(lambda: SimpleNamespace(sse_keepalive_s=every_s))  # type: ignore[arg-type,return-value]
    call = RequestContext(ROUTES["/v1/chat/completions"], {"headers": []}, None, send)  # type: ignore[arg-type]
    keepalive.watch(call, 100.0)
    return keepalive, call


async def test_the_head_goes_with_the_first_comment_and_errors_are_events_from_then_on() -> None:
    sent: list[Message] = []
    keepalive, call = watched(15.0, sent)
    counts = []
    for now in (114.9, 115.0, 129.9, 130.0):
        await keepalive.sweep(now)
        counts.append(len(sent))
    assert counts == [0, 2, 2, 3]
    assert sent[0]["status"] == 200
    assert (b"x-accel-buffering", b"no") in sent[0]["headers"]
    assert [message["body"] for message in sent[1:]] == [COMMENT] * 2
    await call.refuse(Refused(Refusal.DEADLINE, "late"))
    assert json.loads(sent[3]["body"].removeprefix(b"data: "))["error"]["code"] == "deadline"
    assert not sent[3].get("more_body")


@pytest.mark.parametrize(("every_s", "begun"), [(0.0, False), (15.0, True)])
async def test_no_comment_is_sent_if_disabled_or_after_the_first_event(
    every_s: float, *, begun: bool
) -> None:
    sent: list[Message] = []
    keepalive, call = watched(every_s, sent)
    call.started = begun
    await keepalive.sweep(1000.0)
    assert sent == []


@pytest.mark.process
async def test_a_request_is_retried_after_comments_or_rejected_by_an_event(stack: Stack) -> None:
    stack.gateway |= {"sse_keepalive_s": 0.05}
    await stack.start_controller()
    await stack.start_worker()
    fails, serves = await stack.replica("fails"), await stack.replica("serves")

    async def fail(exchange: Exchange) -> None:
        stack.controller.set(fails, serves)
        await stack.reaches(2, "tidegate_replicas_up", model="alpha")
        await exchange.reply(b"{}", status=500)

    fails.answer, serves.answer = fail, stream(OK + DONE)
    body = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = answer.aiter_raw()
        assert (answer.status_code, await anext(chunks)) == (200, COMMENT)
        assert answer.headers["content-type"].startswith("text/event-stream")
        stack.controller.set(fails)
        rest = b"".join([chunk async for chunk in chunks])
    assert rest.replace(COMMENT, b"") == OK + DONE
    assert (len(fails.hits), len(serves.hits)) == (1, 1)
    await stack.reaches(1, "tidegate_ttft_seconds_count", model="alpha")

    await stack.ready()
    impatient = {"x-request-timeout-s": "0.5"}
    answer = await stack.http.post("/v1/chat/completions", json=body, headers=impatient)
    *comments, last, end = answer.content.split(b"\n\n")
    assert (answer.status_code, set(comments), end) == (200, {COMMENT.strip()}, b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "no_replica"
