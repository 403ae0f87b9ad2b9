"""Specifications of replica hosts on this machine, and clients of their engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from policy.config.deployment import ModelSpec
from policy.wire.headers import SECRET_HEADER
from serve.host.replica_host import HostSpec
from serve.host.version_check import installed
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

WITHIN_S = 120.0


def host_spec(
    model: ModelSpec, folder: Path, shape: str = "small", weights: ResolvedWeights | None = None
) -> HostSpec:
    """One shape of the first revision of ``model``; its state directory is ``folder``."""
    return HostSpec(
        model=model, weights=weights, shape=shape, generation=1, controller="127.0.0.1:1", secret="s",
        state_dir=str(StateDir(folder).ensure().root), versions=installed(),
    )  # fmt: skip


def client(url: str, timeout_s: float = WITHIN_S) -> httpx.AsyncClient:
    """A client of the engine at ``url`` that knows the secret."""
    headers = {SECRET_HEADER: "s"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)


def prompt(max_tokens: int) -> dict[str, Any]:
    """A streamed completion of exactly ``max_tokens``."""
    return {"model": "m", "prompt": "hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
