"""vLLM's own publisher of KV events, and what the index knows of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from policy.hashing import block_keys
from policy.routing.engine_prefix_index import NamedPrompt
from policy.types import EngineKind, Runner
from serve.engine.interface import NAMED, EngineSpec
from tests.serve.sim_driver import until

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 4
TOKENS = list(range(100, 124))


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> Any:
    from vllm.distributed.kv_events import BlockStored  # noqa: PLC0415 - vLLM takes seconds to import

    usual = {"lora_id": None, "medium": "GPU", "lora_name": None}
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=BLOCK, **usual | more
    )  # fmt: skip


def removed(*hashes: int, medium: str = "GPU") -> Any:
    from vllm.distributed.kv_events import BlockRemoved  # noqa: PLC0415

    return BlockRemoved(block_hashes=list(hashes), medium=medium)


@contextmanager
def publisher(folder: Path, buffer_steps: int = 100) -> Iterator[Callable[..., None]]:
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: PLC0415

    endpoints = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    made = ZmqEventPublisher(0, *endpoints, buffer_steps=buffer_steps)
    yield lambda *events: made.publish(KVEventBatch(ts=0.0, events=list(events)))
    made.shutdown()


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Any]:
    from serve.engine.vllm_kv_events import KvEvents  # noqa: PLC0415

    events = KvEvents(BLOCK, f"ipc://{folder}/events", f"ipc://{folder}/replay")
    await asyncio.sleep(0.1)  # a subscription takes effect when its peer has it
    yield events
    events.check()
    events.close()


def finds(events: Any, tokens: list[int] = TOKENS, extras: list[Any] | None = None) -> tuple[int, int]:
    found: tuple[int, int] = events.index.tokens_of(block_keys(tokens, BLOCK, extras=extras or ()))
    return found


async def test_stores_removals_and_clears_are_followed_in_both_memories(tmp_path: Path) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared  # noqa: PLC0415

    with publisher(tmp_path) as publish:
        async with following(tmp_path) as events:
            publish(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], parent=2))
            await until(lambda: finds(events) == (12, 0))
            # Without tokens: placeholders of the offloading connector.
            publish(stored([3], [], medium="CPU"), removed(3))
            await until(lambda: finds(events) == (8, 4))
            publish(stored([9], TOKENS[16:20], parent=8))
            publish(removed(3, medium="CPU"))
            await until(lambda: finds(events) == (8, 0))
            publish(AllBlocksCleared())
            await until(lambda: finds(events) == (0, 0))


async def test_adapters_salts_and_groups_are_kept_apart(tmp_path: Path) -> None:
    salted = [("sql", "tenant"), ("sql",)]
    with publisher(tmp_path) as publish:
        async with following(tmp_path) as events:
            publish(stored([1, 2], TOKENS[:8], extra_keys=salted, lora_name="sql"))
            publish(stored([1], TOKENS[:4], group_idx=1))
            await until(lambda: finds(events, TOKENS[:8], salted) == (8, 0))
            assert finds(events) == (0, 0)
            request = SimpleNamespace(
                prompt_token_ids=TOKENS, prompt_embeds=None, mm_features=None, cache_salt="tenant",
                lora_request=SimpleNamespace(lora_name="sql"), sampling_params=None,
            )  # fmt: skip
            NAMED.set(NamedPrompt((2,), (24,), 24))
            events.name(request)
            [held] = events.index.news(-1).held
            assert (held.hash, held.tokens) == (2, 8)


async def test_missed_batches_are_asked_for_again(tmp_path: Path) -> None:
    with publisher(tmp_path) as publish:
        publish(stored([1], TOKENS[:4]))  # before anybody listens
        await asyncio.sleep(0.3)
        async with following(tmp_path) as events:
            publish(stored([2], TOKENS[4:8], parent=1))
            await until(lambda: finds(events) == (8, 0))
            events.subscriber.socket.unsubscribe(b"")
            await asyncio.sleep(0.3)
            publish(stored([3], TOKENS[8:12], parent=2))
            await asyncio.sleep(0.3)
            events.subscriber.socket.subscribe(b"")
            await asyncio.sleep(0.3)
            publish(stored([4], TOKENS[12:16], parent=3))
            await until(lambda: finds(events) == (16, 0))


async def test_after_lost_batches_a_request_asks_vllm_what_it_finds(tmp_path: Path) -> None:
    with publisher(tmp_path, buffer_steps=1) as publish:
        async with following(tmp_path) as events:
            NAMED.set(NamedPrompt((2,), (24,), 24))
            params = SimpleNamespace(extra_args=None)
            request = SimpleNamespace(
                prompt_token_ids=TOKENS, prompt_embeds=None, mm_features=None, cache_salt=None,
                lora_request=None, sampling_params=params,
            )  # fmt: skip
            events.name(request)
            assert params.extra_args is None
            publish(stored([1, 2], TOKENS[:8]))
            await until(lambda: finds(events) == (8, 0))
            events.subscriber.socket.unsubscribe(b"")
            await asyncio.sleep(0.3)
            publish(stored([7], TOKENS[16:20]))
            await asyncio.sleep(0.3)
            events.subscriber.socket.subscribe(b"")
            await asyncio.sleep(0.3)
            publish(stored([8], TOKENS[12:16]))
            await until(lambda: finds(events) == (0, 0))
            events.name(request)
            assert params.extra_args == {"kv_cache_report_mode": "full"}


def spec(engine_args: dict[str, Any], runner: Runner = Runner.GENERATE) -> EngineSpec:
    return EngineSpec(
        kind=EngineKind.VLLM, model="m", runner=runner, host="127.0.0.1", secret="x", bound=8,
        engine_args=engine_args,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "on"),
    [
        ({}, True),
        ({"enable_prefix_caching": False}, False),
        ({"kv_events_config": {"enable_kv_cache_events": False}}, False),
        ({"data_parallel_size": 2}, False),
    ],
)
def test_events_are_published_for_this_user_alone(
    args: dict[str, Any], on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.engine.vllm_kv_events import event_arguments  # noqa: PLC0415

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = event_arguments(spec(args))
    assert bool(found) is on
    assert not event_arguments(msgspec.structs.replace(spec(args), runner=Runner.POOLING))
    for folder in tmp_path.glob("*/kv-*"):
        assert folder.stat().st_mode & 0o777 == 0o700
