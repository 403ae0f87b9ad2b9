"""The ready endpoints of a Kubernetes service, by its EndpointSlices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from gateway.telemetry.structured_log import Log
from policy.config.external_servers import KubernetesService
from store.kubernetes.api_server import Metadata, ObjectWatch, own_namespace

# How long the first call waits for the first list.
FIRST_S = 5.0


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Slice(msgspec.Struct):
    """A slice (discovery.k8s.io/v1)."""

    metadata: Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class EndpointSlices:
    """Follows one service from the first call of :meth:`addresses` until :meth:`close`."""

    def __init__(self, service: KubernetesService, log: Log, on_change: Callable[[], None]) -> None:
        self._wanted = service.port
        namespace = service.namespace or own_namespace()
        self._watch = ObjectWatch(
            service.api,
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={service.service}"},
            _Slice,
            on_change=on_change,
            failed=lambda error: log.warning("kubernetes_failed", service=service.service, cause=error),
        )

    async def addresses(self) -> list[tuple[str, int]] | None:
        """Address and port of each ready endpoint; ``None`` while none were listed."""
        if not self._watch.started:
            self._watch.start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._watch.listed.wait(), FIRST_S)
        if self._watch.objects is None:
            return None
        found: set[tuple[str, int]] = set()
        for each in self._watch.objects.values():
            port = self._port(each)
            for endpoint in each.endpoints or ():
                # Unknown counts as ready. A pod that is to end is not, though it may still serve.
                if port and endpoint.conditions.ready is not False and not endpoint.conditions.terminating:
                    found |= {(address, port) for address in endpoint.addresses}
        return sorted(found)

    async def close(self) -> None:
        await self._watch.close()

    def _port(self, each: _Slice) -> int | None:
        wanted = self._wanted
        if isinstance(wanted, int):
            return wanted
        for port in each.ports or ():
            if wanted is None or port.name == wanted:
                return port.port
        return None
