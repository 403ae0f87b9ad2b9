"""Polls external servers: whether they answer and what they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import httpx
import msgspec

from gateway.http.client import is_local_fault
from gateway.routing.fleet import FleetView, external_replica
from policy.config.deployment import Deployment, ModelSpec
from policy.types import EngineKind, Replica

PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 2.0
# How often a server that answers requests is asked for its models.
LIST_EVERY_S = 10.0


class _Listed(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class _Answer(NamedTuple):
    """The last answer of a server, when it came, and how many reads had come by then."""

    replica: Replica
    max_model_len: int | None
    at: float
    reads: int


@dataclass(eq=False)
class ExternalPoller:
    """Probes every URL of every external model, without any of Tidegate's secrets."""

    view: FleetView
    deployment: Callable[[], Deployment]

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._answers: dict[tuple[str, str], _Answer] = {}

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while True:
                await asyncio.gather(
                    *(
                        self._probe_model(client, spec)
                        for spec in self.deployment().models
                        if spec.engine is EngineKind.EXTERNAL
                    )
                )
                await asyncio.sleep(PROBE_EVERY_S)

    async def _probe_model(self, client: httpx.AsyncClient, spec: ModelSpec) -> None:
        found = await asyncio.gather(*(self._probe(client, spec.name, url) for url in spec.urls))
        lengths = [length for _, length in found if length is not None]
        self.view.set_external(
            spec.name, [replica for replica, _ in found], min(lengths) if lengths else None
        )

    async def _probe(self, client: httpx.AsyncClient, model: str, url: str) -> tuple[Replica, int | None]:
        base = url.rstrip("/").removesuffix("/v1")
        at, reads = self._clock(), self.view.reads(model, base)
        last = self._answers.get((model, base))
        if last is not None and reads > last.reads and at < last.at + LIST_EVERY_S:
            self._answers[model, base] = last._replace(reads=reads)
            return last.replica, last.max_model_len
        listed: list[_Listed] = []
        try:
            answer = await client.get(f"{base}/v1/models")
            ready = answer.status_code == 200
            if ready:
                listed = msgspec.json.decode(answer.content, type=_Models).data
        except (httpx.HTTPError, ValueError, RecursionError) as error:  # no answer, or one that is not JSON
            # A lack of resources on this machine is no failure of the server.
            ready = is_local_fault(error) and self.view.is_answering(model, base)
        adapters = tuple(entry.id for entry in listed if entry.parent is not None)
        own = next((entry for entry in listed if entry.id == model), None)
        replica = external_replica(model, base, ready=ready, adapters=adapters, at=self._clock())
        length = None if own is None else own.max_model_len
        if ready:
            self._answers[model, base] = _Answer(replica, length, at, reads)
        else:
            self._answers.pop((model, base), None)
        return replica, length
