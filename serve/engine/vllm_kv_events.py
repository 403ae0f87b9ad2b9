"""vLLM's KV events: which blocks its cache stores and removes, followed on a socket beside the engine.

What events cannot be had again is lost, and nothing counts as held until vLLM says so again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from policy.hashing import block_keys
from policy.routing.engine_prefix_index import KvBlockIndex
from policy.routing.kv_event_log import KvEventLog, hashable
from policy.types import Runner
from serve.engine.interface import NAMED, EngineSpec
from store.kv_events.subscriber import KvEventSubscriber
from store.state_dir import private_directory

# A unix socket's path has at most 107 bytes.
MAX_PATH = 100
_FOLDER = "kv-"

log = logging.getLogger("tidegate.engine")


def event_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The arguments with which vLLM publishes the events of its KV cache, on sockets only this user can open.

    None where the deployment file has its own ``kv_events_config``, for engines without a prefix cache, and
    for several engines in one, since those publish on a port each.
    """
    given = spec.engine_args
    if (
        spec.runner is not Runner.GENERATE
        or given.get("enable_prefix_caching") is False
        or "kv_events_config" in given
        or given.get("data_parallel_size", 1) != 1
    ):
        return {}
    folder = _folder()
    if len(os.fsencode(folder)) > MAX_PATH:
        log.warning("the path of %s is too long for a socket: what is cached is estimated", folder)
        return {}
    found: dict[str, Any] = {
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
    }
    if given.get("kv_offloading_size") and "kv_transfer_config" not in given:
        # Or the events of host memory name only some of its blocks.
        extra = {"kv_connector_extra_config": {"self_describing_kv_events": True}}
        found["kv_transfer_config"] = extra
    return found


def followed(llm: Any) -> KvEvents | None:
    """The events of an engine; ``None`` where they do not tell what a prompt finds, or it publishes none.

    With a sliding window or a state beside attention the hits of several caches meet. A draft model that
    reads hidden states computes the last cached block again.
    """
    config = llm.vllm_config
    model, drafts = config.model_config, config.speculative_config
    sources = llm.engine_core.get_kv_event_sources()
    if (
        len(sources) != 1
        or not config.cache_config.enable_prefix_caching
        or model.is_hybrid
        or model.get_sliding_window() is not None
        or (drafts is not None and drafts.use_eagle_block_drop())
    ):
        return None
    [source] = sources.values()
    return KvEvents(config.cache_config.block_size, source.endpoint, source.replay_endpoint)


class KvEvents:
    """Keeps ``index`` at what the engine publishes at ``endpoint``, and names its prompts there."""

    def __init__(self, block_tokens: int, endpoint: str, replay_endpoint: str | None) -> None:
        self.index = KvBlockIndex(block_tokens)
        self._block_tokens = block_tokens
        self._lost = 0
        self._log = KvEventLog(self.index)
        replay = None if replay_endpoint is None else _reachable(replay_endpoint)
        self.subscriber = KvEventSubscriber(self._log, _reachable(endpoint), replay, self._report)

    def close(self) -> None:
        self.subscriber.close()
        shutil.rmtree(_path(), ignore_errors=True)

    def check(self) -> None:
        """Raise what ended the subscription."""
        self.subscriber.check()

    def _report(self) -> None:
        lost = self._log.lost + self._log.malformed
        if lost > self._lost:
            log.warning("%d batches of KV events were lost", lost - self._lost)
            self._lost = lost

    def name(self, request: Any) -> None:
        """Tie the prompt of vLLM's ``request`` to the prefixes that its gateway named."""
        if (named := NAMED.get()) is None:
            return
        tokens = request.prompt_token_ids
        if tokens is None or request.prompt_embeds is not None:
            self.index.announce(named.hashes)
            return
        keys = block_keys(tokens, self._block_tokens, extras=self._extras(request, len(tokens)))
        if self.index.name(named, keys, len(tokens)) and (params := request.sampling_params) is not None:
            # It then repeats what it finds in its cache.
            params.extra_args = {**(params.extra_args or {}), "kv_cache_report_mode": "full"}

    def _extras(self, request: Any, tokens: int) -> list[Hashable]:
        """What vLLM adds to the identity of each full block of a prompt, as in its events."""
        size, adapter, salt = self._block_tokens, request.lora_request, request.cache_salt
        blocks = tokens // size
        if request.mm_features:
            extras, media = [], 0
            for start in range(0, blocks * size, size):
                extra, media = generate_block_hash_extra_keys(request, start, start + size, media)
                extras.append(extra)
            return [hashable(extra) for extra in to_event_extra_keys(extras) or ()]
        usual = (adapter.lora_name,) if adapter else ()
        first = (*usual, salt) if salt else usual
        return [first or None, *[usual or None] * (blocks - 1)] if first else []


def _reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def _path() -> Path:
    return private_directory() / f"{_FOLDER}{os.getpid()}"


def _folder() -> Path:
    """This process's directory for sockets; those of processes that were killed are removed."""
    own = _path()
    for other in own.parent.glob(f"{_FOLDER}*"):
        if not Path("/proc", other.name.removeprefix(_FOLDER)).exists():
            shutil.rmtree(other, ignore_errors=True)
    own.mkdir(mode=0o700, exist_ok=True)
    return own
