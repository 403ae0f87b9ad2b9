"""Requests that the fleet cannot serve go upstream within the spend cap, without our headers or keys."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from starlette.types import Message

from gateway.delivery.fallback_provider import FallbackProvider
from gateway.delivery.spillover import Spillover
from gateway.http.asgi_exchange import SENT
from gateway.protocol import body as bodies
from gateway.protocol.errors import NO_ROOM, Refused
from gateway.protocol.paths import ROUTES
from gateway.request_context import RequestContext
from gateway.routing.fleet import ServedModel
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import FallbackProviderConfig, ProviderPrice
from policy.deployment_file.parse import parse
from policy.errors import Refusal
from policy.request import Request
from tests.gateway.certificate import certify
from tests.gateway.fake_replica import ANSWER, DONE, Exchange, event, stream
from tests.gateway.fake_upstream import FakeUpstream
from tests.policy.example_documents import GOOD

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PRICE = {"input": 1_000_000.0, "output": 1_000_000.0}  # a token costs 1
USED = 2  # tokens of the fake's answer
KEY = "their-key"


class Site:
    """Spillover in front of a simulated fleet."""

    def __init__(self, folder: Path) -> None:
        self.logged = io.StringIO()
        self.metrics = WorkerMetrics()
        self.spillover = Spillover(self.metrics, StructuredLog(0, self.logged), random.Random(0))  # noqa: S311 - when to probe
        self.clock = asyncio.get_running_loop().time
        self.served = ServedModel("m")
        self.served.handles = [SimpleNamespace(admissible=True)]  # type: ignore[list-item]
        self.asked_of_fleet = 0
        self.comments = False
        self.refusal: Refused | None = Refused(Refusal.DEADLINE, "The fleet has no room.")
        self.key_file = folder / "key"
        self.key_file.write_text(KEY + "\n")
        self.document: dict[str, Any] = {**GOOD, "gateway": {"workers": 1, "connect_timeout_s": 2.0}}

    def deploy(self, *upstreams: FakeUpstream, **more: Any) -> None:
        entries = [
            {
                "name": f"u{place}", "url": f"{upstream.url}/v1", "key_file": str(self.key_file),
                "models": {"m": "their-m"}, "price": PRICE, "cost_cap_per_h": 10_000, **more,
            }
            for place, upstream in enumerate(upstreams)
        ]  # fmt: skip
        self.spillover.read(parse({**self.document, "upstreams": entries}))

    async def ask(self, path: str = "/v1/chat/completions", *, wait_s: float = 9.0, **body: Any) -> Response:
        response = Response()
        raw = json.dumps({**CHAT, **body}).encode()
        headers = [
            (b"authorization", b"Bearer our-key"), (b"x-request-id", b"our-id"), (b"accept", b"*/*"),
            (b"x-session-id", b"s"), (b"user-agent", b"client"),
        ]  # fmt: skip
        call = RequestContext(ROUTES[path], {"headers": headers}, response.receive, response.send)
        read = bodies.read(raw)
        call.streaming = bool(read.stream)
        response.call = call
        now = self.clock()
        request = Request("m", size=len(raw), arrived=now, deadline=now + wait_s)

        async def fleet() -> None:
            self.asked_of_fleet += 1
            if self.comments:
                call.comment()
            if self.refusal is not None:
                raise self.refusal
            call.replica = b"r1"
            await call.answer(200, [], b"ours")

        await self.spillover.around(fleet, call, self.served, request, body=read, raw=raw)
        return response

    def attempts(self, outcome: str, upstream: str = "u0") -> float:
        of = {"model": "m", "upstream": upstream, "outcome": outcome}
        return sum(
            sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == "tidegate_spillover_attempts_total" and sample.labels == of
        )

    def spent(self, upstream: str = "u0") -> float:
        (endpoint,) = (e for e in self.spillover._endpoints if e.upstream.name == upstream)
        assert endpoint.spend_cap.held == 0
        return endpoint.spend_cap.spent(self.clock())


class Response:
    """The response as a client receives it."""

    def __init__(self) -> None:
        self.call: RequestContext
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        self.body += message.get("body", b"")
        return SENT

    async def receive(self) -> Message:
        raise AssertionError("no test waits for this client")


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    site.spillover.read(parse(GOOD))  # closes pooled connections


async def running() -> AsyncIterator[FakeUpstream]:
    upstream = FakeUpstream()
    await upstream.start()
    yield upstream
    await upstream.stop()


upstream = pytest_asyncio.fixture(running, name="upstream")
other = pytest_asyncio.fixture(running, name="other")


async def fail(exchange: Exchange) -> None:
    await exchange.reply(b"{}", status=500)


async def test_a_spilled_request_has_none_of_our_headers_or_keys(site: Site, upstream: FakeUpstream) -> None:
    site.deploy(upstream)
    response = await site.ask(temperature=0.5, cache_salt="salt")
    assert (response.status, response.body) == (200, ANSWER)
    assert response.headers[b"x-tidegate-replica"] == b"upstream:u0"
    assert (response.call.outcome, response.call.by_fallback) == ("ok", True)
    (hit,) = upstream.hits
    assert hit.path == "/v1/chat/completions"
    assert hit.json == {**CHAT, "model": "their-m", "temperature": 0.5}
    assert hit.headers == {
        "host": upstream.url.removeprefix("http://"),
        "content-type": "application/json",
        "authorization": f"Bearer {KEY}",
        "accept": "*/*",
        "content-length": str(len(hit.body)),
    }
    assert site.spent() == USED
    assert site.attempts("served") == 1


@pytest.mark.parametrize("wanted", [True, False])
async def test_usage_settles_the_reservation(site: Site, upstream: FakeUpstream, wanted: bool) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    sent_text = event("Par") + event("is") + event(finish="stop")
    upstream.answer = stream(sent_text + usage + DONE)
    site.deploy(upstream)
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    response = await site.ask(stream=True, **options)
    assert upstream.hits[0].json["stream_options"] == {"include_usage": True}
    assert response.body == sent_text + (usage if wanted else b"") + DONE
    assert site.spent() == 7


async def test_a_stream_that_got_comments_is_spilled_over(site: Site, upstream: FakeUpstream) -> None:
    upstream.answer = stream(event("a") + event(finish="stop") + DONE)
    site.comments = True
    site.deploy(upstream)
    response = await site.ask(stream=True)
    assert response.body == b": keep-alive\n\n" + event("a") + event(finish="stop") + DONE


async def test_a_broken_stream_is_an_error(site: Site, upstream: FakeUpstream, other: FakeUpstream) -> None:
    upstream.answer = stream(event("Par"))
    site.deploy(upstream, other)
    response = await site.ask(stream=True, max_tokens=8)
    assert b"[DONE]" not in response.body
    assert b'"stream_broken"' in response.body
    assert response.call.outcome == Refusal.STREAM_BROKEN
    assert other.hits == []
    assert site.spent() >= 8  # without usage the whole reservation is spent


@pytest.mark.parametrize(
    ("reason", "path", "wait_s"),
    [
        *((reason, "/v1/chat/completions", 9.0) for reason in sorted(set(Refusal) - NO_ROOM)),
        *((Refusal.DEADLINE, f"/v1/{name}", 9.0) for name in ("messages", "tokenize", "rerank", "score")),
        (Refusal.DEADLINE, "/v1/chat/completions", -1.0),
    ],
)
async def test_other_refusals_and_routes_and_late_requests_are_not_spilled_over(
    site: Site, upstream: FakeUpstream, reason: Refusal, path: str, wait_s: float
) -> None:
    site.deploy(upstream)
    site.refusal = Refused(reason, "no")
    with pytest.raises(Refused) as caught:
        await site.ask(path, wait_s=wait_s)
    assert caught.value is site.refusal
    assert upstream.hits == []


async def test_a_model_at_zero_is_waited_for_if_it_starts_in_time(site: Site, upstream: FakeUpstream) -> None:
    site.served.handles = []
    site.served.down = site.served.asleep = True
    site.refusal = None
    site.deploy(upstream)  # its assumed start-up time is a minute
    assert (await site.ask(wait_s=9.0)).body == ANSWER
    assert site.asked_of_fleet == 0
    assert (await site.ask(wait_s=90.0)).body == b"ours"
    site.served.start_s = 2.0
    assert (await site.ask(wait_s=9.0)).body == b"ours"
    site.served.start_s = 100.0
    assert (await site.ask(wait_s=90.0)).body == ANSWER


async def test_without_a_ready_replica_the_start_time_decides(site: Site, upstream: FakeUpstream) -> None:
    site.served.handles[0].admissible = False  # type: ignore[misc]
    site.deploy(upstream)
    await site.ask(wait_s=59.0)  # assumed_start_s is 60
    assert (site.asked_of_fleet, len(upstream.hits)) == (0, 1)
    await site.ask(wait_s=61.0)
    assert (site.asked_of_fleet, len(upstream.hits)) == (1, 2)


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_a_providers_error_is_not_forwarded(site: Site, upstream: FakeUpstream, status: int) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(b'{"error":{"message":"their words"}}', status=status)

    upstream.answer = refuse
    site.deploy(upstream)
    with pytest.raises(Refused) as caught:
        await site.ask()
    assert caught.value is site.refusal
    assert site.spent() == 0


async def test_the_next_provider_is_tried(site: Site, upstream: FakeUpstream, other: FakeUpstream) -> None:
    upstream.answer = fail
    site.deploy(upstream, other)
    assert (await site.ask()).headers[b"x-tidegate-replica"] == b"upstream:u1"
    await upstream.stop()
    await asyncio.sleep(0)  # its connections close
    assert (await site.ask()).headers[b"x-tidegate-replica"] == b"upstream:u1"
    assert (site.attempts("failed"), site.attempts("unreachable")) == (1, 1)
    await upstream.start()


async def test_no_more_is_spent_than_the_cap(site: Site, upstream: FakeUpstream) -> None:
    site.deploy(upstream, cost_cap_per_h=60.0)
    for _ in range(4):
        await site.ask(max_tokens=10)  # each holds about 30 and uses 2
    assert site.spent() == 4 * USED
    with pytest.raises(Refused, match="no room"):
        await site.ask(max_tokens=60)
    assert site.attempts("cost_cap") == 1
    assert site.spent() == 4 * USED


async def test_workers_divide_the_cap(site: Site, upstream: FakeUpstream) -> None:
    site.document["gateway"]["workers"] = 4
    site.deploy(upstream, cost_cap_per_h=100.0)
    assert site.spillover._endpoints[0].spend_cap.cap == 25.0


async def test_spending_survives_an_apply(site: Site, upstream: FakeUpstream, other: FakeUpstream) -> None:
    site.deploy(upstream)
    await site.ask()
    site.deploy(other)
    assert site.spent() == USED
    await site.ask()
    assert site.spent() == 2 * USED
    assert len(other.hits) == 1


async def test_a_disconnect_aborts_the_request_and_is_billed(site: Site, upstream: FakeUpstream) -> None:
    asked = asyncio.Event()

    async def never(exchange: Exchange) -> None:
        asked.set()
        await exchange.gone.wait()

    upstream.answer = never
    site.deploy(upstream)
    task = asyncio.create_task(site.ask(max_tokens=50))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await upstream.hits[0].gone.wait()
    assert site.spent() > 50
    assert site.attempts("cancelled") == 1


async def test_a_failing_provider_is_ejected(site: Site, upstream: FakeUpstream) -> None:
    upstream.answer = fail
    site.document["gateway"]["eject"] = {"failures": 3, "base_s": 300, "max_s": 300}
    site.deploy(upstream)
    for _ in range(6):
        with pytest.raises(Refused, match="no room"):
            await site.ask()
    assert len(upstream.hits) == 3


async def test_an_ejected_provider_is_probed_by_one_request(site: Site, upstream: FakeUpstream) -> None:
    site.document["gateway"]["eject"] = {"failures": 1, "base_s": 0.001, "max_s": 1}
    site.deploy(upstream)
    good = upstream.answer
    upstream.answer = fail
    with pytest.raises(Refused):
        await site.ask()
    await asyncio.sleep(0.002)
    upstream.answer = good
    assert (await site.ask()).status == 200
    assert (await site.ask()).status == 200


async def test_an_answer_has_our_name_of_the_model_and_the_key_may_be_a_variable(
    site: Site, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    site.deploy(upstream, key_file=None, key_env="THEIR_KEY", models={"m": "alpha"})
    assert json.loads((await site.ask()).body)["model"] == "m"
    assert upstream.hits[0].headers["authorization"] == f"Bearer {KEY}"


async def test_a_key_is_read_again_when_its_file_changes(site: Site, upstream: FakeUpstream) -> None:
    site.deploy(upstream)
    await site.ask()
    site.key_file.write_text("new-key")
    os.utime(site.key_file, ns=(1, 1))
    await site.ask()
    site.deploy(upstream, key_file=None)
    await site.ask()
    keys = [hit.headers.get("authorization") for hit in upstream.hits]
    assert keys == [f"Bearer {KEY}", "Bearer new-key", None]


@pytest.mark.parametrize("content", [None, "", "two words", "a\r\nx: y", "é"])
async def test_a_provider_needs_a_usable_key(site: Site, upstream: FakeUpstream, content: str | None) -> None:
    site.key_file.unlink()
    if content is not None:
        site.key_file.write_text(content)
    site.deploy(upstream)
    for _ in range(2):
        with pytest.raises(Refused, match="no room"):
            await site.ask()
    assert upstream.hits == []
    (line,) = site.logged.getvalue().splitlines()
    sent_text = msgspec.json.decode(line)
    assert (sent_text["event"], sent_text["upstream"]) == ("upstream_key_unusable", "u0")


async def test_tls_is_used_and_verified(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "certificate.pem"
    secure = FakeUpstream(certify(certificate))
    await secure.start()
    site.deploy(secure)
    with pytest.raises(Refused, match="no room"):  # an untrusted certificate
        await site.ask()
    assert site.attempts("unreachable") == 1
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    site.spillover.read(parse(GOOD))
    site.deploy(secure)
    assert (await site.ask()).body == ANSWER
    await secure.stop()


@pytest.mark.parametrize(
    ("came", "goes"),
    [
        (b'{ "model" : "m","seed":1e0}', b'{ "model" : "theirs","seed":1e0}'),
        (b'{"cache_salt":"s" , "model":"m"}', b'{ "model":"theirs"}'),
        (b'{"model":"m", "cache_salt" : "a\\"b,", "n":1}', b'{"model":"theirs",  "n":1}'),
        (b'{"model":"m","n":1 , "cache_sal\\u0074":null }', b'{"model":"theirs","n":1  }'),
        (
            b'{"cache_salt":"s","model":"m","stream":true}',
            b'{"stream_options":{"include_usage":true},"model":"theirs","stream":true}',
        ),
    ],
)
async def test_a_provider_gets_the_clients_bytes_with_its_model_name(came: bytes, goes: bytes) -> None:
    price = ProviderPrice(input=0.0, output=0.0)
    url = "http://127.0.0.1:9/v1"
    upstream = FallbackProviderConfig(
        name="u", url=url, models={"m": "theirs"}, price=price, cost_cap_per_h=0.0
    )
    endpoint = FallbackProvider(upstream, parse(GOOD), StructuredLog(0, io.StringIO()))
    sent = endpoint.outgoing(ROUTES["/v1/chat/completions"], "m", bodies.read(came), came)
    assert (sent.parts if isinstance(sent.parts, bytes) else b"".join(sent.parts)) == goes
    assert sent.size == len(goes)
    assert sent.counts == (b"stream" in came)
