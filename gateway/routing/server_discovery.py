"""The servers of external models: those listed, and those found by DNS, in a file, or in Kubernetes.

What was found stays in force while the source does not answer: servers are probed, and one that is gone gets
no requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec import structs

from gateway.routing.discovered_server import DiscoveredServer, is_labelled, with_kv_events
from gateway.routing.endpoint_slices import EndpointSlices, ServiceEndpoint
from gateway.telemetry.structured_log import StructuredLog
from policy.config.convert import convert
from policy.config.deployment import ModelSpec
from policy.config.external_servers import DiscoveryConfig, ExternalServer, ServerSettings
from policy.deployment_file.external_server_checks import check_servers
from store.kubernetes.engine_pod_labels import PREFIX
from store.watched_files import WatchedFiles


class ServerDiscovery:
    """The servers of all external models; to be asked every few seconds, and when they ``changed``."""

    def __init__(self, log: StructuredLog) -> None:
        self._log = log
        self.changed = asyncio.Event()
        self._found: dict[str, tuple[DiscoveryConfig, tuple[DiscoveredServer, ...]]] = {}
        self._files: dict[str, WatchedFiles] = {}
        self._slices: dict[str, EndpointSlices] = {}
        self._failed: set[str] = set()

    async def servers(self, spec: ModelSpec) -> tuple[DiscoveredServer, ...]:
        """The servers of a model now."""
        discovery = spec.discovery
        listed = tuple(_of(each, f"urls: {each.url}: ") for each in spec.servers)
        if discovery is None:
            return listed
        last = self._found.get(spec.name)
        found = last[1] if last is not None and last[0] == discovery else ()
        if last is not None and last[0] != discovery:
            await self.forget(spec.name)
        try:
            found = await self._look(spec, discovery, found)
            self._failed.discard(spec.name)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, others are served
            if spec.name not in self._failed:
                self._failed.add(spec.name)
                self._log.warning("discovery_failed", model=spec.name, cause=error)
        self._found[spec.name] = discovery, found
        known = {server.base for server in listed}
        return (*listed, *(server for server in found if server.base not in known))

    async def keep(self, models: Sequence[str]) -> None:
        """Forget all models but these."""
        for name in self._found.keys() - set(models):
            await self.forget(name)

    async def forget(self, model: str) -> None:
        """Stop to look for the servers of a model."""
        self._found.pop(model, None)
        self._files.pop(model, None)
        self._failed.discard(model)
        if (slices := self._slices.pop(model, None)) is not None:
            await slices.close()

    async def close(self) -> None:
        await self.keep(())

    async def _look(
        self, spec: ModelSpec, discovery: DiscoveryConfig, last: tuple[DiscoveredServer, ...]
    ) -> tuple[DiscoveredServer, ...]:
        model = spec.name
        if discovery.file is not None:
            return await asyncio.to_thread(self._read_file, model, discovery, last)
        if discovery.kubernetes is not None:
            slices = self._slices.get(model)
            if slices is None:
                slices = self._slices[model] = EndpointSlices(
                    discovery.kubernetes,
                    self._log,
                    self.changed.set,
                    reads_pods=is_labelled(spec),
                )
            endpoints = await slices.endpoints()
            return last if endpoints is None else _servers(endpoints, discovery)
        return _servers(await _resolve(discovery.dns), discovery)

    def _read_file(
        self, model: str, discovery: DiscoveryConfig, last: tuple[DiscoveredServer, ...]
    ) -> tuple[DiscoveredServer, ...]:
        path = Path(str(discovery.file))
        file = self._files.setdefault(model, WatchedFiles(path))
        if not file.changed():
            return last
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        given = convert(raw, tuple[str | ExternalServer, ...], str(path))
        check_servers(str(path), given)
        file.were_read()
        defaults = _settings(discovery)
        servers = (ExternalServer(url=each, **defaults) if isinstance(each, str) else each for each in given)
        return tuple(_of(each, f"{path}: {each.url}: ") for each in servers)


def _of(server: ExternalServer, source: str) -> DiscoveredServer:
    return DiscoveredServer(**structs.asdict(server), source=source)


def _settings(discovery: DiscoveryConfig) -> dict[str, Any]:
    return {name: getattr(discovery, name) for name in ServerSettings.__struct_fields__}


def _servers(
    endpoints: Sequence[ServiceEndpoint], discovery: DiscoveryConfig
) -> tuple[DiscoveredServer, ...]:
    scheme = "https" if discovery.https else "http"
    servers = []
    for each in endpoints:
        settings = _settings(discovery)
        if each.built is not None:
            settings["shape"], settings["mode"] = each.built
        settings["adapters"] = each.adapters or discovery.adapters
        url, source = f"{scheme}://{_bracketed(each.host)}:{each.port}", f"pod {each.pod}: {PREFIX}"
        found = DiscoveredServer(url=url, source=source, replica=each.replica, **settings)
        servers.append(found if each.kv_events is None else with_kv_events(found, *each.kv_events))
    return tuple(servers)


async def _resolve(name: str) -> list[ServiceEndpoint]:
    """The addresses of ``HOST:PORT``; raises ``OSError``."""
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [ServiceEndpoint(host, int(port)) for host in sorted({str(address[0]) for *_, address in found})]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
