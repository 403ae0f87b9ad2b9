"""The ready endpoints of a Kubernetes service, by its EndpointSlices, with what their pods' labels say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gateway.telemetry.structured_log import StructuredLog
from policy.config.external_servers import KubernetesService
from store.kubernetes.api_server import Object, ObjectMetadata, ObjectWatch, own_namespace
from store.kubernetes.engine_pod_labels import adapters_of, kv_events_ports, replica_id, shape_and_mode

# How long the first call waits for the first list.
FIRST_S = 5.0


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _Target | None = None


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Slice(msgspec.Struct, rename="camel"):
    """A slice (discovery.k8s.io/v1)."""

    metadata: ObjectMetadata
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _ServiceSpec(msgspec.Struct):
    selector: dict[str, str] | None = None


class _Service(msgspec.Struct):
    metadata: ObjectMetadata
    spec: _ServiceSpec = msgspec.field(default_factory=_ServiceSpec)


class _Pod(msgspec.Struct):
    metadata: ObjectMetadata


class ServiceEndpoint(NamedTuple):
    """A ready endpoint: its ``pod`` and the id of that ``replica``, if it has one, and what they say.

    ``built`` are a shape and a mode, ``kv_events`` two ports, as they are written.
    """

    host: str
    port: int
    pod: str = ""
    replica: str = ""
    built: tuple[str, str] | None = None
    adapters: tuple[str, ...] = ()
    kv_events: tuple[str, str] | None = None


class EndpointSlices:
    """Follows one service from the first call of :meth:`endpoints` until :meth:`close`.

    With ``reads_pods`` it also follows the pods that the service selects, for their labels.
    """

    def __init__(
        self,
        service: KubernetesService,
        log: StructuredLog,
        on_change: Callable[[], None],
        *,
        reads_pods: bool,
    ) -> None:
        self._service = service
        self._log = log
        self._on_change = on_change
        self._namespace = service.namespace or own_namespace()
        named = {"labelSelector": f"kubernetes.io/service-name={service.service}"}
        self._slices = self._watch("apis/discovery.k8s.io/v1", "endpointslices", named, _Slice)
        self._services: ObjectWatch[_Service] | None = None
        if reads_pods:
            named = {"fieldSelector": f"metadata.name={service.service}"}
            self._services = self._watch("api/v1", "services", named, _Service)
        self._selector = ""
        self._pods: ObjectWatch[_Pod] | None = None
        self._no_port = False

    async def endpoints(self) -> Sequence[ServiceEndpoint] | None:
        """The ready endpoints, one for each pod; ``None`` while none were listed."""
        if not self._slices.started:
            self._slices.start()
            if self._services is not None:
                self._services.start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._slices.listed.wait(), FIRST_S)
        await self._follow_pods()
        if self._slices.objects is None:
            return None
        # A pod of two address families is in slices of both: one of IPv4 comes first.
        slices = sorted(self._slices.objects.values(), key=lambda each: each.address_type)
        found: dict[tuple[str, int], ServiceEndpoint] = {}
        for each in slices:
            port = self._port(each)
            for endpoint in each.endpoints or ():
                # Unknown counts as ready. A pod that is to end is not, though it may still serve.
                is_ready = endpoint.conditions.ready is not False and not endpoint.conditions.terminating
                if port and is_ready and endpoint.addresses:
                    made = self._endpoint(endpoint, port, each.metadata.labels)
                    found.setdefault((made.replica or made.host, port), made)
        self._report_ports(slices, has_port=any(self._port(each) for each in slices))
        return sorted(found.values(), key=lambda each: (each.host, each.port))

    async def close(self) -> None:
        for watch in (self._slices, self._services, self._pods):
            if watch is not None:
                await watch.close()

    async def _follow_pods(self) -> None:
        """Follow the pods of the selector that the service has now."""
        services = (self._services.objects if self._services is not None else None) or {}
        given = [each.spec.selector or {} for each in services.values()]
        selector = ",".join(f"{key}={value}" for labels in given for key, value in sorted(labels.items()))
        if selector != self._selector:
            if self._pods is not None:
                await self._pods.close()
            self._selector, self._pods = selector, None
            if selector:
                self._pods = self._watch("api/v1", "pods", {"labelSelector": selector}, _Pod)
                self._pods.start()

    def _endpoint(self, endpoint: _Endpoint, port: int, labels: Mapping[str, str]) -> ServiceEndpoint:
        # All addresses of an endpoint reach the same.
        host, target = endpoint.addresses[0], endpoint.target_ref
        if target is None or target.kind != "Pod":
            built, kv_events = (
                shape_and_mode(ObjectMetadata(), labels),
                kv_events_ports(ObjectMetadata(), labels),
            )
            return ServiceEndpoint(host, port, built=built, kv_events=kv_events)
        pods = (self._pods.objects if self._pods is not None else None) or {}
        metadata = pods[target.name].metadata if target.name in pods else ObjectMetadata()
        return ServiceEndpoint(
            host,
            port,
            target.name,
            replica_id(target.name, target.uid),
            shape_and_mode(metadata, labels),
            adapters_of(metadata),
            kv_events_ports(metadata, labels),
        )

    def _port(self, each: _Slice) -> int | None:
        wanted = self._service.port
        if isinstance(wanted, int):
            return wanted
        for port in each.ports or ():
            if wanted is None or port.name == wanted:
                return port.port
        return None

    def _report_ports(self, slices: Sequence[_Slice], *, has_port: bool) -> None:
        """Say once that no slice has the port that is wanted."""
        no_port = any(each.endpoints for each in slices) and not has_port
        if no_port and not self._no_port:
            ports = sorted({port.name or str(port.port) for each in slices for port in each.ports or ()})
            self._log.warning(
                "kubernetes_port_unknown",
                service=self._service.service,
                port=self._service.port,
                ports=", ".join(ports),
            )
        self._no_port = no_port

    def _watch(
        self, group: str, plural: str, query: Mapping[str, str], kind: type[Object]
    ) -> ObjectWatch[Object]:
        path = f"/{group}/namespaces/{self._namespace}/{plural}"
        return ObjectWatch(
            self._service.api, path, query, kind, on_change=self._on_change, failed=self._failed
        )

    def _failed(self, error: Exception) -> None:
        self._log.warning("kubernetes_failed", service=self._service.service, cause=error)
