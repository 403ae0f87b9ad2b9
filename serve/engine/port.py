"""The engine port: what a replica host needs of an engine, whatever makes the tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from policy.config.deployment import Sim
from policy.engine.model import Timing
from policy.engine.step_samples import StepSample
from policy.types import EngineKind, Runner
from policy.wire.heartbeat import AdapterRef

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# The only paths that reach an engine's app; vLLM's other routes control or reveal too much.
ALLOWED = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/score"),
        ("POST", "/v1/rerank"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
    }
)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process is told, as one JSON line on its standard input.

    ``host`` is the address to listen on, ``bound`` how many requests the guard admits at once,
    ``weights`` a local directory (empty for the simulated engine), ``cpus`` the cores of a shape
    without GPUs. ``adapter_slots`` of 0 serves no adapters; else they are of ``max_rank`` at most, and lie by
    digest in one of the directories ``blobs`` or are pulled from the ``controller`` into the last of them.
    Those of ``hold`` are loaded before the first request; no files of more than ``max_bytes`` are pulled.
    One that ``sleeps`` shares its GPUs with others.
    """

    kind: EngineKind
    replica: str
    model: str
    runner: Runner
    shape: str
    generation: int
    host: str
    secret: str
    bound: int
    weights: str = ""
    tensor_parallel: int = 1
    cpus: int = 0
    engine_args: dict[str, Any] = {}
    sim: Sim = Sim()
    progress_timeout_s: float = 60.0
    adapter_slots: int = 0
    max_rank: int = 0
    max_bytes: int = 0
    blobs: tuple[str, ...] = ()
    controller: str = ""
    hold: tuple[AdapterRef, ...] = ()
    sleeps: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own counts; ``steps`` and scheduled ``tokens`` are totals that never fall.

    ``prefilling`` is at most how many prompt tokens are not computed of requests that had no token yet.
    ``preempted`` is a total too, of requests that lost their KV; ``deferred`` of those that wait were
    passed over, as for an adapter that no slot is free for.
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
    """One engine in this process. ``app`` is its OpenAI-compatible HTTP surface."""

    app: ASGIApp
    max_model_len: int | None

    def stats(self) -> EngineStats:
        """Counts of this instant, without blocking."""
        ...

    def take_steps(self) -> tuple[StepSample, ...]:
        """What its steps took since the last call, without blocking."""
        ...

    def timing(self) -> Timing:
        """What bounds its steps, and how long they take if that is known."""
        ...

    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters it can serve now."""
        ...

    @property
    def adapter_slots(self) -> int:
        """How many adapters it can have loaded at once; 0 if it loads none."""
        ...

    async def load(self, name: str, path: Path) -> None:
        """Load the adapter in the directory ``path``, which is never changed, and serve it as ``name``.

        There must be a free slot; one that is served already is loaded if the engine has lost it. Raises
        :class:`policy.errors.AdapterRefused`, after which nothing changed, and
        :class:`policy.errors.EngineFailed`.
        """
        ...

    async def unload(self, name: str) -> None:
        """Serve ``name`` no more and free its slot once no request uses it; one not loaded is none.

        Raises :class:`policy.errors.EngineFailed`.
        """
        ...

    async def loaded(self) -> frozenset[str]:
        """Names of what takes a slot in truth: an engine may evict by itself.

        Raises :class:`policy.errors.EngineFailed`.
        """
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether it was made to sleep."""
        ...

    async def sleep(self) -> None:
        """Return when nothing runs and its GPUs are free for others; what runs is never ended by it.

        Until :meth:`wake` no request may come, and no adapter may be loaded or unloaded. Raises
        :class:`policy.errors.EngineFailed`.
        """
        ...

    async def wake(self) -> None:
        """Return when it serves again, with its weights and its adapters, and nothing cached.

        Raises :class:`policy.errors.EngineFailed`.
        """
        ...

    @property
    def dead(self) -> bool:
        """Whether it is known to make no more tokens; cheap enough to ask for every request."""
        ...

    async def check(self) -> None:
        """Raise :class:`policy.errors.EngineFailed` when the engine can make no more tokens."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...
