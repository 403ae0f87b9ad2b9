"""Checks of an external model: its servers, and where they are discovered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from policy.config.control import KubernetesLease
from policy.config.convert import require
from policy.config.deployment import FallbackProviderConfig, ModelSpec
from policy.config.external_servers import (
    DiscoveryConfig,
    ExternalServer,
    KubernetesService,
    ServerSettings,
    server_shape,
)
from policy.errors import ConfigError

_VISIBLE = re.compile(r"[!-~]+")
_HOST_PORT = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_DOTTED_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
# The kinds of Kubernetes workloads with a subresource `scale` whose pods can be replicas.
WORKLOADS = ("deployment", "statefulset", "leaderworkerset")
_URL = "http(s)://HOST:PORT, optionally ending in /v1"


def check_external(path: str, spec: ModelSpec) -> None:
    """Raise :class:`policy.errors.ConfigError` for an external model that cannot be served."""
    expected = "at least one base URL for an external engine, or the section `discovery`"
    require(spec.urls or spec.discovery is not None, f"{path}.urls", list(spec.urls), expected)
    check_servers(f"{path}.urls", spec.urls)
    for i, server in enumerate(spec.servers):
        _check_built(f"{path}.urls[{i}]", spec, server)
    if spec.discovery is not None:
        _check_discovery(f"{path}.discovery", spec.discovery)
        _check_built(f"{path}.discovery", spec, spec.discovery)
    for key in ("source", "engine_args", "env", *(() if spec.is_scaled else ("mode",))):
        value = getattr(spec, key)
        require(not value, f"{path}.{key}", value, "nothing: Tidegate does not deploy an external engine")
    _check_workloads(path, spec)


def _check_workloads(path: str, spec: ModelSpec) -> None:
    """Shapes say how servers were built; with workloads, or counts of modes, they are scaled."""
    in_kubernetes = spec.discovery is not None and spec.discovery.kubernetes is not None
    scaled = spec.is_scaled or any(mode.replicas != 1 for mode in spec.modes.values())
    require(bool(spec.modes) or not scaled, f"{path}.modes", {}, "a mode: its shapes have workloads")
    owners: dict[str, str] = {}
    for name, shape in spec.shapes.items():
        at = f"{path}.shapes.{name}"
        require(
            not shape.engine_args, f"{at}.engine_args", shape.engine_args, "nothing: its pods have theirs"
        )
        if not scaled:
            continue
        expected = "nothing: only pods that discovery.kubernetes finds are scaled"
        require(in_kubernetes or not shape.workload, f"{at}.workload", shape.workload, expected)
        expected = f"KIND/NAME with one of the kinds: {', '.join(WORKLOADS)}"
        kind, _, named = shape.workload.partition("/")
        good = kind in WORKLOADS and _LABEL.fullmatch(named)
        require(good, f"{at}.workload", shape.workload, expected)
        owner = owners.setdefault(shape.workload, name)
        require(owner == name, f"{at}.workload", shape.workload, f"one that shapes.{owner} does not have")


def check_servers(path: str, urls: Sequence[str | ExternalServer]) -> None:
    """Raise :class:`policy.errors.ConfigError` for a list of servers that is not valid."""
    seen: dict[str, str] = {}
    for i, given in enumerate(urls):
        at = f"{path}[{i}]"
        server = ExternalServer(url=given) if isinstance(given, str) else given
        where = at if isinstance(given, str) else f"{at}.url"
        check_url(where, server.url, _URL)
        parts = urlsplit(server.url)
        require(parts.path.rstrip("/") in ("", "/v1"), where, server.url, _URL)
        first = seen.setdefault(parts.netloc, where)
        require(first == where, where, server.url, f"a server that is listed once (see {first})")
        _check_settings(at, server, https=parts.scheme == "https")


def check_url(path: str, url: str, expected: str) -> None:
    """Raise :class:`policy.errors.ConfigError` unless ``url`` is one of HTTP without query and user."""
    try:
        parts = urlsplit(url)
        port_is_good = parts.port != 0
    except ValueError:  # a bracket without the other, or no number
        raise ConfigError(path, "***" if "@" in url else url, expected) from None
    good = parts.scheme in ("http", "https") and parts.hostname and port_is_good and _VISIBLE.fullmatch(url)
    plain = not parts.query and not parts.fragment and "@" not in parts.netloc
    shown = "***" if "@" in parts.netloc else url  # the part before the @ may contain a password
    require(good and plain and is_host(str(parts.hostname)), path, shown, expected)


def is_host(name: str) -> bool:
    """Whether HTTP clients take the host: no IPv4 address such as 10.0.0.256, no label such as ``xn--a``."""
    try:
        if _DOTTED_NUMBERS.fullmatch(name):
            ip_address(name)
        else:
            name.encode("ascii").decode("idna")
    except ValueError:
        return False
    return True


def check_key(path: str, server: ServerSettings | FallbackProviderConfig) -> None:
    """Raise :class:`policy.errors.ConfigError` for two sources of one key."""
    one = server.key_file is None or server.key_env is None
    require(one, f"{path}.key_env", server.key_env, "nothing: key_file is set")


def _check_built(path: str, spec: ModelSpec, given: ServerSettings) -> None:
    modes = {name: mode.shape for name, mode in spec.modes.items()}
    if (problem := server_shape(given, spec.shapes, modes, f"{path}.").problem) is not None:
        raise problem


def _check_settings(path: str, server: ServerSettings, *, https: bool) -> None:
    check_key(path, server)
    tls = server.ca_file is None or https
    require(tls, f"{path}.ca_file", server.ca_file, "nothing: its URL is not https")
    port, replay = server.kv_events_port, server.kv_events_replay_port
    at = f"{path}.kv_events_replay_port"
    require(replay is None or port is not None, at, replay, "nothing: kv_events_port is not set")
    require(replay is None or replay != port, at, replay, "another port than kv_events_port")


def _check_discovery(path: str, found: DiscoveryConfig) -> None:
    given = [name for name in ("dns", "file", "kubernetes") if getattr(found, name)]
    require(len(given) == 1, path, given, "one of the keys: dns, file, kubernetes")
    _check_settings(path, found, https=found.https or found.file is not None)
    if found.dns:
        match = _HOST_PORT.fullmatch(found.dns)
        good = match is not None and 0 < int(match[3]) < 65_536
        require(good, f"{path}.dns", found.dns, "HOST:PORT, such as vllm.models.svc.cluster.local:8000")
    if (service := found.kubernetes) is not None:
        check_object(f"{path}.kubernetes", service, service="a service")


def check_object(path: str, found: KubernetesService | KubernetesLease, **names: str) -> None:
    """Check an object of Kubernetes: its name, for whose kind see ``names``, its namespace and API server."""
    for key, kind in names.items():
        name = getattr(found, key)
        require(_LABEL.fullmatch(name), f"{path}.{key}", name, f"the name of {kind}")
    named = not found.namespace or _LABEL.fullmatch(found.namespace)
    require(named, f"{path}.namespace", found.namespace, "the name of a namespace; empty: the pod's own")
    if found.api:
        check_url(f"{path}.api", found.api, "http(s)://HOST:PORT of the API server or `kubectl proxy`")
