"""The engine port: what a replica host needs of any engine, real or simulated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import msgspec

from policy.config.deployment import SimConfig
from policy.engine.performance_model import Timing
from policy.engine.step_samples import StepSample
from policy.routing.engine_prefix_index import KvBlockIndex, NamedPrompt
from policy.types import EngineKind, Runner
from policy.wire.heartbeat import AdapterRef

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key in the `extensions` of a scope where an app finds a :class:`ResponseWriter`, if there is one.
WRITER = "tidegate.writer"

# The prefixes of the request that an engine's app serves, where its gateway named any.
NAMED: ContextVar[NamedPrompt | None] = ContextVar("NAMED", default=None)

# The only paths that reach an engine's app; vLLM's other routes control or reveal too much.
ALLOWED = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/score"),
        ("POST", "/v1/rerank"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
    }
)


class ResponseWriter(Protocol):
    """One response, written without waiting. An app uses it instead of ``send``, never both.

    It is at :data:`WRITER` in the extensions of a scope. All that is written in one turn of the event loop,
    to all responses of a connection, leaves in one frame.
    """

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The head, once; it leaves with the first byte of the body."""

    def write(self, data: bytes) -> None:
        """A part of the body: of a stream, whole events. No effect once the client is gone."""

    def end(self, data: bytes = b"") -> None:
        """The last part of the body, which may be empty; nothing follows."""

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once if the client leaves before the end; at once if it has left."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of an engine process, sent as one JSON line on its standard input.

    ``host`` is the address to listen on, ``bound`` the maximum number of concurrent requests (``None``: by
    the engine's limits), ``weights`` a local directory (empty for the simulated engine), ``share`` the part
    of each GPU that is its own, ``cpus`` the cores of a shape without GPUs. With
    ``adapter_slots`` of 0 no adapters are served; otherwise of rank ``max_rank`` at most. Their files are
    found by digest in the directories ``blobs``, or pulled from the ``controller`` into the last of them, up
    to ``max_bytes``. Adapters of ``hold`` are loaded before the first request. An engine that ``sleeps``
    shares its GPUs with others.
    """

    kind: EngineKind
    model: str
    runner: Runner
    host: str
    secret: str
    bound: int | None
    weights: str = ""
    tensor_parallel: int = 1
    share: float = 1.0
    cpus: int = 0
    engine_args: dict[str, Any] = {}
    sim: SimConfig = SimConfig()
    progress_timeout_s: float = 60.0
    adapter_slots: int = 0
    max_rank: int = 0
    max_bytes: int = 0
    blobs: tuple[str, ...] = ()
    controller: str = ""
    hold: tuple[AdapterRef, ...] = ()
    sleeps: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own counts. ``steps``, scheduled ``tokens`` and ``preempted`` are totals since its start.

    ``prefilling`` is an upper bound of the prompt tokens still to compute for requests without an output
    token. ``deferred`` counts the waiting requests that the scheduler passed over, for example because their
    adapter has no slot.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens: int = 0
    steps: int = 0
    prefilling: int = 0
    preempted: int = 0
    deferred: int = 0


class Engine(Protocol):
    """One engine in this process. ``app`` is its OpenAI-compatible HTTP surface.

    ``adapter_slots`` is how many adapters it can have loaded at once, 0 if it loads none. ``blocks`` follows
    its KV cache by its events; ``None`` if it has none. There it names the prompts of :data:`NAMED`.
    """

    app: ASGIApp
    max_model_len: int | None
    adapter_slots: int
    blocks: KvBlockIndex | None

    def stats(self) -> EngineStats:
        """The current counts; does not block."""

    def take_steps(self) -> tuple[StepSample, ...]:
        """Step times since the last call; does not block."""

    def timing(self) -> Timing:
        """The limits of its steps, and the latency model if one is known."""

    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters it can serve now."""

    async def load(self, name: str, path: Path) -> None:
        """Load the adapter in the directory ``path``, whose files never change, and serve it as ``name``.

        A slot must be free. An adapter that is already served is loaded again if the engine has evicted it.
        Raises :class:`policy.errors.AdapterRefused`, after which nothing has changed, and
        :class:`policy.errors.EngineFailed`.
        """

    async def unload(self, name: str) -> None:
        """Stop serving ``name`` and free its slot once no request uses it; no effect if it is not loaded.

        Raises :class:`policy.errors.EngineFailed`.
        """

    async def loaded(self) -> frozenset[str]:
        """Names of the adapters that occupy slots now; an engine may evict by itself.

        Raises :class:`policy.errors.EngineFailed`.
        """

    async def sleep(self) -> None:
        """Return when no request runs and its GPU memory is free. Running requests are not cancelled.

        Until :meth:`wake` no request may come, and no adapter may be loaded or unloaded. Raises
        :class:`policy.errors.EngineFailed`.
        """

    async def wake(self) -> None:
        """Return when it serves again, with weights and adapters, and an empty cache.

        Raises :class:`policy.errors.EngineFailed`.
        """

    async def profile(self, seconds: float) -> Path:
        """Record its operators and kernels for ``seconds``; returns a Chrome trace (gzip), the caller's file.

        It stands still while the file is written. Raises :class:`policy.errors.PreconditionFailed` without a
        profiler or while it records, :class:`policy.errors.EngineFailed`.
        """

    @property
    def dead(self) -> bool:
        """Whether it has failed for good; cheap enough to check for every request."""

    async def check(self) -> None:
        """Raise :class:`policy.errors.EngineFailed` if the engine has failed for good."""

    async def close(self) -> None:
        """Release its resources."""
