"""External servers that publish KV events: the router knows what they hold, by the tokens that they make."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import pytest

from gateway.protocol import body as bodies
from gateway.protocol.json_splice import upstream_body
from gateway.protocol.paths import ROUTES
from gateway.routing.discovered_server import external_replica
from gateway.routing.engine_cache import external_server_cache
from gateway.routing.engine_cache.external_server_cache import MAX_WAITING, SentPrompt, ServerCache
from gateway.routing.engine_cache.external_server_caches import ServerCaches
from gateway.routing.engine_cache.prompt_blocks import KEY_BYTES, PROMPT_BYTES, KnownPrompts, PromptBlocks
from gateway.routing.engine_cache.prompt_tokens import KEYS_A_TURN, TokenizablePrompt
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet import FleetView
from gateway.routing.fleet_listeners import FleetListeners
from gateway.routing.model_routers import ModelRouters
from gateway.routing.replica_handle import ReplicaHandle
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.deployment_file.parse import parse
from policy.hashing import block_keys, hash_name
from policy.request import Request
from tests.gateway.fake_replica import Exchange
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import until
from tests.store.kv_events.publisher import Publisher, removed, stored

BLOCK = 16
# A token is a character; each prefix has so many.
PREFIX = 64
CHAT = ROUTES["/v1/chat/completions"]


class Server:
    """A double of a vLLM server: its publisher, and ``/tokenize``."""

    def __init__(self) -> None:
        self.http, self.events = FakeUpstream(), Publisher()
        self.status = 200
        self.asked: list[Any] = []
        self.held: set[bytes] = set()
        self.http.answer = self._tokenize

    async def start(self) -> None:
        await self.http.start()
        self.events.start()

    async def stop(self) -> None:
        await self.http.stop()
        await self.events.stop()

    async def serve(self, text: str) -> None:
        """The blocks of this prompt are computed; hashes are those of the beginnings."""
        ends = range(BLOCK, len(text) + 1, BLOCK)
        known = sum(text[:end].encode() in self.held for end in ends) * BLOCK
        new = [text[:end].encode() for end in ends if end > known]
        self.held |= {*new}
        parent = text[:known].encode() or None
        await self.events.publish(stored(new, tokens(text)[known:], BLOCK, parent))

    async def evict(self, text: str, keep: int = 0) -> None:
        gone = [text[:end].encode() for end in range(keep + BLOCK, len(text) + 1, BLOCK)]
        self.held -= {*gone}
        await self.events.publish(removed(*gone))

    async def _tokenize(self, exchange: Exchange) -> None:
        asked = exchange.json
        assert exchange.path == "/tokenize"
        self.asked.append(asked)
        await exchange.reply(
            json.dumps({"tokens": tokens(asked["messages"][0]["content"])}).encode(), status=self.status
        )


def tokens(text: str) -> list[int]:
    return [ord(each) for each in text]


class Fleet:
    """A worker's view and routers of two such servers."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers
        self.lines = StringIO()
        self.routers = ModelRouters(random.Random(1))  # noqa: S311 - ties, not secrets
        events = FleetListeners(cached=self.routers.learn_cached, forgotten=self.routers.forget)
        caches = ServerCaches(events.cached, events.forgotten, StructuredLog(0, self.lines))
        self.view = FleetView("s", WorkerMetrics(), events=events, caches=caches)
        urls = [server.http.url for server in servers]
        self.view.read_document(parse({"models": [{"name": "alpha", "engine": "external", "urls": urls}]}))

    def follow(self, servers: list[Server]) -> None:
        self.view.set_external(
            "alpha",
            [
                (
                    external_replica("alpha", each.http.url, adapters=(), at=0.0),
                    ServerAccess(
                        kv_events_port=each.events.port, kv_events_replay_port=each.events.replay_port
                    ),
                )
                for each in servers
            ],
            None,
        )

    @property
    def handles(self) -> list[ReplicaHandle]:
        served = self.view.get("alpha")
        assert served is not None
        return served.handles

    def caches(self) -> list[ServerCache]:
        found = [handle.cache for handle in self.handles]
        assert None not in found
        return found  # type: ignore[return-value]

    def believed(self, text: str) -> list[int]:
        """The tokens of this prompt that the router believes cached, by server."""
        request = request_of(text)
        self.routers._fresh.clear()
        self.routers.choose(request, [handle.look() for handle in self.handles], 0.0)
        [decision] = self.routers._fresh.values()
        return [quote.cached for quote in decision.quotes]

    def chosen(self, text: str) -> int:
        quote = self.routers.choose(request_of(text), [handle.look() for handle in self.handles], 0.0)
        assert quote is not None
        return [handle.view.key for handle in self.handles].index(quote.candidate.key)

    async def send(self, at: int, text: str, *, computed: bool = True) -> SentPrompt | None:
        """One request to a server, whatever the router would choose, and its end."""
        request, handle = request_of(text), self.handles[at]
        quote = self.routers.choose(request, [handle.look()], 0.0)
        assert quote is not None
        self.routers.began(request, quote, 0.0)
        cache = handle.cache
        assert cache is not None
        sent = cache.sent(request, prompt_of(text))
        if computed:
            await self.servers[at].serve(text)
        if sent is not None:
            await until(lambda: not cache._known.asking, "its tokens were asked for")
            sent.ended(served=True)
        await asyncio.sleep(0.35)  # until it is settled
        return sent


def request_of(text: str) -> Request:
    ends = range(PREFIX, len(text) + 1, PREFIX)
    hashes = tuple(hash_name(text[:end]) & ~1 for end in ends)
    return Request(
        "alpha", prompt_tokens=len(text), prefix=hashes, depths=tuple(ends), prompt_bytes=len(text)
    )


def prompt_of(text: str, salt: bytes = b"", **more: Any) -> TokenizablePrompt:
    raw = json.dumps({"model": "alpha", "messages": [{"role": "user", "content": text}], **more}).encode()
    return TokenizablePrompt(CHAT, bodies.read(raw), model="theirs", adapter="", salt=salt)


@asynccontextmanager
async def deployed() -> AsyncIterator[Fleet]:
    servers = [Server(), Server()]
    for server in servers:
        await server.start()
    fleet = Fleet(servers)
    try:
        fleet.follow(servers)
        await until(lambda: all(cache.exact for cache in fleet.caches()), "both servers are followed")
        yield fleet
    finally:
        fleet.view.close()
        for server in servers:
            await server.stop()
        await until(lambda: not [task for task in asyncio.all_tasks() if "KV events" in task.get_name()])


SYSTEM = "".join(random.Random(7).choices("abcdefgh", k=512))  # noqa: S311
FIRST, SECOND, THIRD = (SYSTEM + each * 16 * 13 for each in "xyz")


@pytest.mark.slow
async def test_the_router_picks_the_server_that_has_the_prefix_and_another_after_its_eviction() -> None:
    async with deployed() as fleet:
        first = fleet.servers[0]
        await fleet.send(0, FIRST)
        await fleet.send(0, SECOND)
        assert fleet.believed(THIRD) == [512, 0]
        assert fleet.chosen(THIRD) == 0
        assert [len(server.asked) for server in fleet.servers] == [2, 0]
        assert first.asked[0]["model"] == "theirs"
        await first.evict(SECOND, keep=256)
        await until(lambda: fleet.believed(THIRD) == [256, 0], "evicted in part")
        await fleet.send(1, SECOND)
        assert fleet.believed(THIRD)[1] >= 512
        assert fleet.chosen(THIRD) == 1


@pytest.mark.slow
async def test_what_a_request_did_not_leave_in_the_cache_is_not_believed_if_its_tokens_are_known() -> None:
    async with deployed() as fleet:
        await fleet.servers[0].serve(THIRD[600:])  # of another client
        await until(lambda: fleet.caches()[0].index.block_tokens == BLOCK, "the size of blocks")
        await fleet.send(0, FIRST, computed=False)
        assert fleet.believed(FIRST) == [0, 0]
        fleet.servers[0].status = 500
        await fleet.send(0, SECOND)
        assert fleet.believed(SECOND)[0] > 500


@pytest.mark.slow
async def test_a_server_that_ends_is_estimated_and_one_that_is_restarted_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_server_cache, "DOWN_S", 0.2)
    async with deployed() as fleet:
        cache, server = fleet.caches()[0], fleet.servers[0]
        await fleet.send(0, FIRST)
        assert fleet.believed(FIRST)[0] > 500
        await server.events.stop()
        await until(lambda: not cache.exact, "its events are missed")
        assert fleet.believed(FIRST) == [0, 0]
        assert await fleet.send(0, FIRST, computed=False) is None
        server.held.clear()
        server.events.start()
        await until(lambda: cache.exact, "it is followed again")
        assert fleet.believed(FIRST) == [0, 0]
        await fleet.send(0, FIRST)
        assert fleet.believed(FIRST)[0] > 500
        fleet.follow(fleet.servers[1:])
        assert not cache.exact


@pytest.mark.slow
async def test_a_server_without_tokenize_is_estimated() -> None:
    async with deployed() as fleet:
        cache, server = fleet.caches()[0], fleet.servers[0]
        server.status = 404
        for number in range(external_server_cache.REFUSALS):
            await fleet.send(0, f"{number}{FIRST}")
        assert cache.state == "unsupported"
        assert "404" in cache.problem
        assert json.loads(fleet.lines.getvalue())["event"] == "kv_events_problem"
        assert await fleet.send(0, FIRST) is None
        assert await fleet.send(0, SECOND) is None
        assert fleet.believed(SECOND)[0] > 500


@pytest.mark.slow
async def test_events_that_do_not_show_what_is_served_are_given_up() -> None:
    async with deployed() as fleet:
        for number in range(external_server_cache.DOUBT + 1):
            await fleet.send(0, f"{number:04d}{FIRST}", computed=False)
            await fleet.servers[0].serve(f"{number:04d}of another tokenizer")
        assert "do not show" in fleet.caches()[0].problem


async def test_a_subscription_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed() as fleet:
        cache = fleet.caches()[0]
        monkeypatch.setattr(cache._log, "take", lambda *_: 1 / 0)
        await fleet.servers[0].serve(FIRST)
        await until(lambda: cache.state == "unsupported", "it is given up")
        assert "ZeroDivisionError" in cache.problem


async def test_a_server_that_cannot_be_followed_for_a_lack_of_descriptors_is_followed_later() -> None:
    async with deployed() as fleet:
        fleet.servers.append(Server())
        await fleet.servers[-1].start()
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
        try:
            fleet.follow(fleet.servers)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert [handle.cache is None for handle in fleet.handles] == [False, False, True]
        assert '"event":"kv_events_not_followed"' in fleet.lines.getvalue()
        fleet.follow(fleet.servers)
        await until(lambda: fleet.caches()[-1].exact, "it is followed")


@pytest.mark.slow
async def test_under_pressure_the_newest_prompts_are_asked_for() -> None:
    async with deployed() as fleet:
        [cache, _], server = fleet.caches(), fleet.servers[0]
        await fleet.send(0, FIRST)  # the size of blocks is known
        texts = [f"{number:04d}{FIRST}" for number in range(MAX_WAITING + 20)]
        for text in texts:
            cache.sent(request_of(text), prompt_of(text))
        await until(lambda: len(server.asked) == MAX_WAITING + 1, "all but the oldest are asked for")
        asked = {each["messages"][0]["content"] for each in server.asked}
        assert asked == {FIRST, *texts[20:]}
        await until(lambda: not cache._known.asking)


@pytest.mark.slow
async def test_after_lost_events_a_server_is_asked_to_repeat_what_it_finds() -> None:
    async with deployed() as fleet:
        cache = fleet.caches()[0]
        assert not cache.wants_report(request_of(FIRST))
        await fleet.servers[0].events.send(b"\xc1")
        await until(lambda: cache.index.lossy, "a malformed batch")
        assert cache.wants_report(request_of(FIRST))
        await fleet.send(0, FIRST)
        assert not cache.wants_report(request_of(FIRST))


@pytest.mark.parametrize("given", [{}, {"vllm_xargs": None}])
def test_a_body_asks_for_the_report(given: dict[str, Any]) -> None:
    raw = json.dumps({"model": "m", "messages": [], **given}).encode()
    sent = upstream_body(CHAT, bodies.read(raw), raw, b"", reports_cache=True)
    parts = [sent.parts] if isinstance(sent.parts, bytes) else sent.parts
    assert json.loads(b"".join(parts))["vllm_xargs"] == {"kv_cache_report_mode": "full"}


def test_a_prompt_is_asked_for_as_it_was_sent() -> None:
    arguments = {"enable_thinking": False}
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = prompt_of("hi", b'"salt"', tools=tools, chat_template_kwargs=arguments, temperature=1, n=None)
    prompt.adapter = "sql"
    asked = json.loads(prompt.question() or b"")
    messages = [{"role": "user", "content": "hi"}]
    assert asked == {
        "model": "theirs", "messages": messages, "tools": tools, "chat_template_kwargs": arguments
    }  # fmt: skip
    assert prompt.extras(3) == [("sql", "salt"), ("sql",), ("sql",)]
    assert prompt_of("hi", cache_salt=7).salt == ""
    assert prompt_of("hi", cache_salt="own").salt == "own"
    effort = json.loads(prompt_of("hi", reasoning_effort="low").question() or b"")
    assert effort["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("path", "given", "tokens", "asks"),
    [
        ("/v1/completions", {"prompt": "a text"}, None, True),
        ("/v1/completions", {"prompt": [1, 2, 3]}, [1, 2, 3], True),
        ("/v1/completions", {"prompt": ["two", "texts"]}, None, False),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 4}, None, False),
        ("/v1/chat/completions", {"messages": [], "documents": [{"a": "b"}]}, None, False),
        ("/v1/chat/completions", {"messages": ["a" * (1 << 20)]}, None, False),
        ("/v1/responses", {"input": "a text"}, None, False),
    ],
)
def test_what_would_be_rendered_otherwise_is_not_asked_for(
    path: str, given: dict[str, Any], tokens: list[int] | None, asks: bool
) -> None:
    body = bodies.read(json.dumps({"model": "m", **given}).encode())
    prompt = TokenizablePrompt(ROUTES[path], body, model="m", adapter="", salt=b"")
    assert prompt.tokens() == tokens
    if tokens is None:
        assert (prompt.question() is not None) is asks


def test_prompt_blocks_are_bounded() -> None:
    known = KnownPrompts(max_bytes=3 * PROMPT_BYTES + 11 * KEY_BYTES)
    for number in range(4):
        known.add(2, PromptBlocks(array("q", [number] * 3), 16, 48))
    assert [each.keys[0] for each in known.of(2, 16)] == [2, 3]
    assert known.of(2, 32) == []
    known.add(4, PromptBlocks(array("q", [9] * 6), 16, 96))
    assert (known.of(2, 16), len(known.of(4, 16))) == ([], 1)


def test_prompts_without_a_full_block_are_bounded_too() -> None:
    known = KnownPrompts(max_bytes=10 * PROMPT_BYTES)
    for deepest in range(0, 200, 2):
        known.add(deepest, PromptBlocks(array("q"), 16, 15))
    assert [deepest for deepest in range(0, 200, 2) if known.of(deepest, 16)] == list(range(180, 200, 2))
    known.add(2, PromptBlocks(array("q", range(10)), 16, 160))
    assert not known.of(180, 16)
    assert known.of(2, 16)


@pytest.mark.parametrize("salt", [b"", b'"of a tenant"'])
async def test_the_keys_of_a_long_prompt_are_made_in_many_turns(salt: bytes) -> None:
    """All 32,000 blocks of 520,000 tokens took one turn of 70 ms."""
    given = list(range(50_000))
    prompt = prompt_of("", salt)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    keys = await prompt.keys(given, BLOCK)
    counting.cancel()
    assert turns >= len(keys) // KEYS_A_TURN
    assert list(keys) == block_keys(given, BLOCK, extras=prompt.extras(len(keys)))
