"""The KV cache of one external server, which publishes what it holds; this worker names what it sent there.

The tokens of a prompt are asked for after it was sent. Until the server's events are followed, and where they
do not tell what a prompt finds, the router estimates.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from gateway.http.http1_client import ConnectionPool
from gateway.routing.engine_cache.prompt_blocks import ENOUGH, KnownPrompts, PromptBlocks
from gateway.routing.engine_cache.prompt_tokens import TokenizablePrompt, ask
from policy.request import Request
from policy.routing.engine_prefix_index import KvBlockIndex, NamedPrompt, PrefixIndexUpdate
from policy.routing.kv_event_log import KvEventLog
from policy.wire.load_stream import COALESCE_S
from store.kv_events.subscriber import KvEventSubscriber

# After this without its events, what a server holds is estimated.
DOWN_S: Final = 5.0
# Events of a request's last step come within this time.
SETTLED_S: Final = 0.25
# Prompts that wait to be asked for, the newest first; and those that are asked for at once.
MAX_WAITING: Final = 64
AT_ONCE: Final = 2
# So many answers in a row, or a majority of more, that the events do not show: they tell nothing.
DOUBT: Final = 8
NO_SUCH_PATH: Final = frozenset({404, 405, 501})
REFUSALS: Final = 4
UNTOLD: Final = -1


class ServerCacheListener(NamedTuple):
    """Called with the ``news`` of a cache, when nothing is known of it any more, and with a problem."""

    news: Callable[[PrefixIndexUpdate], None]
    forgotten: Callable[[], None]
    warn: Callable[[str], None]


class SentPrompt:
    """A prompt that was sent to the server; its ``tokens`` and the ``keys`` of its blocks, once known.

    ``sent_at`` is what the index had stored by then. ``is_hashing``: its keys are being made.
    """

    __slots__ = ("_cache", "is_hashing", "keys", "named", "prompt", "sent_at", "tokens")

    def __init__(
        self, cache: ServerCache, named: NamedPrompt, prompt: TokenizablePrompt, sent_at: int
    ) -> None:
        self._cache = cache
        self.named = named
        self.prompt = prompt
        self.sent_at = sent_at
        self.tokens: list[int] | None = None
        self.is_hashing = False
        self.keys: array[int] | None = None

    def ended(self, *, served: bool) -> None:
        """The request ended there."""
        asyncio.get_running_loop().call_later(SETTLED_S, self._cache.settle, self, served)


class ServerCache:
    """Follows one server's events at the first of ``ports`` of its host; the second one repeats them.

    Until :meth:`close` it names prompts there. ``known`` has the prompts of its model, of all servers.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int | None],
        pool: ConnectionPool,
        known: KnownPrompts,
        listener: ServerCacheListener,
    ) -> None:
        self.ports: tuple[int | None, int | None] = ports
        self.index = KvBlockIndex(0)
        # What requests have in common.
        self.head = b""
        self.pool = pool
        self._known = known
        self._listener = listener
        self._told_at = UNTOLD
        self._telling: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self._waiting: deque[SentPrompt] = deque(maxlen=MAX_WAITING)
        self._asking: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._shown = self._not_shown = self._refused = 0
        self.problem = ""
        self._malformed = False
        self._loop = asyncio.get_running_loop()
        self._log = KvEventLog(self.index)
        address = f"tcp://[{host}]:" if ":" in host else f"tcp://{host}:"
        port, replay_port = ports
        replay = None if replay_port is None else f"{address}{replay_port}"
        self._events: KvEventSubscriber | None = KvEventSubscriber(
            self._log, f"{address}{port}", replay, self._follow
        )
        self.index.watch(self._tell_soon)

    @property
    def exact(self) -> bool:
        """Whether the router knows what the server holds."""
        return self._told_at != UNTOLD

    @property
    def state(self) -> Literal["exact", "waiting", "unsupported"]:
        """How its events are followed, for operators; ``problem`` says why they are not."""
        return "unsupported" if self.problem else "exact" if self.exact else "waiting"

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        for handle in (self._telling, self._forgetting):
            if handle is not None:
                handle.cancel()
        for task in (*self._asking, *self._settling):
            task.cancel()
        self._known.asking -= {each.named.hashes[-1] for each in self._waiting}
        self._waiting.clear()
        self._told_at = UNTOLD
        self.pool.close()

    def sent(self, request: Request, prompt: TokenizablePrompt) -> SentPrompt | None:
        """``request`` goes there: name its prefixes, as soon as its tokens are known."""
        hashes = request.prefix
        if not hashes or self._told_at == UNTOLD:
            return None
        named = NamedPrompt(hashes, request.depths, request.prompt_tokens)
        sent = SentPrompt(self, named, prompt, self.index.stores)
        deepest = hashes[-1]
        known = self._known.of(deepest, self.index.block_tokens)
        if known and not self.index.has(deepest):
            for each in known:
                self._name(sent, each)
        if len(known) < ENOUGH and deepest not in self._known.asking:
            if len(self._waiting) == MAX_WAITING:
                self._known.asking.discard(self._waiting[0].named.hashes[-1])
            self._known.asking.add(deepest)
            self._waiting.append(sent)
            if len(self._asking) < AT_ONCE:
                task = self._loop.create_task(self._ask_all(), name="tokens of prompts")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        return sent

    def wants_report(self, request: Request) -> bool:
        """Whether the server may hold more of a prompt than its events told: it can repeat them."""
        lossy = self.index.lossy and self._told_at != UNTOLD
        return lossy and bool(request.prefix) and not self.index.is_held(request.prefix[-1])

    def settle(self, sent: SentPrompt, served: bool) -> None:
        """A request ended a moment ago: what was assumed of it gives way to what is known.

        Nothing is known of a prompt without tokens: what was served counts as held since then.
        """
        if sent.tokens is not None and sent.keys is None and not sent.is_hashing:
            task = self._loop.create_task(self._divide_and_settle(sent, sent.tokens, served))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
        else:
            self._settle(sent, served)

    async def _divide_and_settle(self, sent: SentPrompt, tokens: list[int], served: bool) -> None:
        await self._divide(sent, tokens)
        self._settle(sent, served)

    def _settle(self, sent: SentPrompt, served: bool) -> None:
        if self._told_at == UNTOLD:
            return
        if not self.index.has(sent.named.hashes[-1]):
            for each in self._known.of(sent.named.hashes[-1], self.index.block_tokens):
                self._name(sent, each)
        if not served or self.index.has(sent.named.hashes[-1]):
            self.index.announce(sent.named.hashes)
        keys = sent.keys
        if not served or not keys or self.index.lossy:
            return
        if self.index.tokens_of(keys[:1]) == (0, 0):
            self._not_shown += 1
        else:
            self._shown += 1
        if self._not_shown >= DOUBT and self._not_shown > self._shown:
            self._give_up("its events do not show the prompts that it serves")

    def _name(self, sent: SentPrompt, blocks: PromptBlocks) -> None:
        self.index.name(sent.named, blocks.keys, blocks.tokens, sent.sent_at)

    def _follow(self) -> None:
        """Its events or its connection changed."""
        error = None if self._events is None else self._events.error
        if self._log.unsupported or error is not None:
            self._give_up(self._log.unsupported or f"its events cannot be followed: {error!r}")
            return
        if self._log.malformed and not self._malformed:
            self._malformed = True
            self._listener.warn("a batch of its KV events is malformed: such batches count as lost")
        if self._events is not None and self._events.current:
            if self._forgetting is not None:
                self._forgetting.cancel()
                self._forgetting = None
            self._tell_soon()
        elif self._forgetting is None and self.exact:
            self._forgetting = self._loop.call_later(DOWN_S, self._forget)

    def _tell_soon(self) -> None:
        if self._telling is None and (self.exact or (self._events is not None and self._events.current)):
            self._telling = self._loop.call_later(COALESCE_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        news = self.index.news(self._told_at)
        self._told_at = news.at
        if news.reset or news.held or news.gone:
            self._listener.news(news)

    def _forget(self) -> None:
        self._forgetting = None
        self._told_at = UNTOLD
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._listener.forgotten()

    def _give_up(self, problem: str) -> None:
        """Estimate from now on."""
        if not self.problem:
            self.problem = problem
            self._listener.warn(problem)
            self.close()
            self._listener.forgotten()

    async def _ask_all(self) -> None:
        while self._waiting:
            sent = self._waiting.pop()
            try:
                await self._ask(sent)
            finally:
                self._known.asking.discard(sent.named.hashes[-1])

    async def _ask(self, sent: SentPrompt) -> None:
        """Find the tokens of a prompt, and name it; what fails leaves it unnamed."""
        tokens = sent.prompt.tokens()
        if tokens is None:
            try:
                question = sent.prompt.question()
                if question is None:
                    return
                status, tokens = await ask(self.pool, self.head, question)
            except (OSError, ValueError):
                return
            # It may also be the model that a server does not know, such as an adapter that was unloaded.
            self._refused = self._refused + 1 if status in NO_SUCH_PATH else 0
            if self._refused == REFUSALS:
                self._give_up(f"it answers {status} to POST /tokenize")
            if status != 200:
                return
        sent.tokens = tokens
        await self._divide(sent, tokens)

    async def _divide(self, sent: SentPrompt, tokens: list[int]) -> None:
        """Name a prompt by its blocks, once their size is known."""
        size = self.index.block_tokens
        if not size or self._told_at == UNTOLD:
            return
        sent.is_hashing = True
        keys = await sent.prompt.keys(tokens, size)
        sent.is_hashing = False
        if self._told_at == UNTOLD or size != self.index.block_tokens:  # forgotten meanwhile
            return
        sent.keys = keys
        blocks = PromptBlocks(sent.keys, size, len(tokens))
        self._known.add(sent.named.hashes[-1], blocks)
        self._name(sent, blocks)
