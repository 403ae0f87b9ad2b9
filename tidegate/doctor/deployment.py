"""Checks of a deployment on this machine: ports, Ray, the network between nodes, and certificates."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from policy.config.deployment import Deployment
from policy.config.grpc_ports import GrpcPort
from policy.config.port_conflicts import ListenAddress
from policy.config.tls import ServerTls
from policy.errors import ConfigError, PreconditionFailed
from serve.internode_bandwidth import BandwidthReport
from store.tls_files import days_left, every_port_with_tls
from tidegate.doctor.finding import Finding, error, not_applicable, ok, warning
from tidegate.supervisor import preflight

_DAY_S = 86_400.0
_SOON_DAYS = 14
# One gigabit per second: weights of 16 GB take over two minutes.
_SLOW_BYTES_PER_S = 125e6
_CONNECT_S = 3.0


def ports(wanted: Iterable[ListenAddress], running: Collection[ListenAddress]) -> Finding:
    """Whether the ports are free, or held by the deployment that runs on this state directory."""
    taken, held = [], []
    listeners = tuple(wanted)
    for listener in listeners:
        if listener in running:
            held.append(str(listener.port))
            continue
        try:
            preflight.bind(*listener).close()
        except PreconditionFailed as problem:
            taken.append(str(problem))
    if taken:
        return error(
            "ports", "; ".join(taken), "stop that process, or choose other ports in the deployment file"
        )
    free = [str(listener.port) for listener in listeners if listener not in running]
    parts = [f"{', '.join(free)} free"] if free else []
    parts += [f"{', '.join(held)} in use by this deployment"] if held else []
    return ok("ports", "; ".join(parts))


def ray(deployment: Deployment, foreign: Callable[[], str | None], environment: Mapping[str, str]) -> Finding:
    """Whether a Ray head can be started, or the named cluster be joined."""
    check, address = "Ray", deployment.cluster.address
    if not deployment.deploys:
        return not_applicable(check, "every model is external")
    if address == "local":
        if (problem := foreign()) is not None:
            found, _, advice = problem.partition("; ")
            return error(check, found, f"stop it; {advice}")
        return ok(check, "no other cluster on this machine")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as problem:
        return error(
            check,
            f"{address} cannot be reached: {problem}",
            "start the cluster (docs/operate.md), or open the port",
        )
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not environment.get("RAY_AUTH_TOKEN") and not path.is_file():
        return error(
            check,
            f"{address} answers, but there is no token at {path}",
            "copy the token of the cluster's head there",
        )
    return ok(check, f"{address} answers")


def network(deployment: Deployment | None, measure: Callable[[Deployment], BandwidthReport]) -> Finding:
    """The bandwidth between the nodes of a cluster that the deployment joins."""
    check = "network between nodes"
    if deployment is None or not deployment.deploys or deployment.cluster.address == "local":
        return not_applicable(
            check, "no cluster is joined (cluster.address), so everything is on this machine"
        )
    measured = measure(deployment)
    if measured.error:
        return warning(check, f"not measured: {measured.error}", "see the check of Ray")
    if not measured.pairs:
        return not_applicable(check, "the cluster has one node")
    found = ", ".join(
        f"{pair.source} to {pair.target} {pair.bytes_per_s * 8 / 1e9:.2f} Gbit/s, {pair.rtt_s * 1e3:.2f} ms"
        for pair in measured.pairs
    )
    if min(pair.bytes_per_s for pair in measured.pairs) < _SLOW_BYTES_PER_S:
        return warning(check, found, "below 1 Gbit/s weights and adapters load slowly: check links and MTU")
    return ok(check, found)


def certificates(deployment: Deployment | None, at: float) -> list[Finding]:
    """The certificates of our own ports, and of each server and fallback provider whose URL is https."""
    own = every_port_with_tls(deployment) if deployment is not None else {}
    found = [own_certificate(files, path, at) for path, files in own.items()]
    servers: dict[tuple[str, str | None], None] = {}
    for spec in deployment.models if deployment is not None else ():
        servers |= {(server.url, server.ca_file): None for server in spec.servers}
    for upstream in deployment.upstreams if deployment is not None else ():
        servers[upstream.url, None] = None
    secure = [(url, ca_file) for url, ca_file in servers if urlsplit(url).scheme == "https"]
    found += [certificate(url, ca_file, at) for url, ca_file in secure]
    return found or [not_applicable("certificates", "no port has TLS and no server an https URL")]


def own_certificate(files: ServerTls | GrpcPort, path: str, at: float) -> Finding:
    """The certificate files of the port whose section is at ``path``."""
    try:
        days = days_left(files, path, at)
    except ConfigError as problem:
        return error("certificates", str(problem), "renew or correct the files; they are read as they change")
    return _valid_for(f"{path}: its files fit", days)


def certificate(url: str, ca_file: str | None, at: float) -> Finding:
    """The certificate of the server at ``url``, verified by ``ca_file`` or the system's authorities."""
    check, parts = "certificates", urlsplit(url)
    host = parts.hostname or ""
    try:
        trusted = ssl.create_default_context(cafile=ca_file)
    except OSError as problem:
        return error(
            check, f"{ca_file} cannot be used: {problem}", "point ca_file to certificates in PEM form"
        )
    try:
        with (
            socket.create_connection((host, parts.port or 443), timeout=_CONNECT_S) as plain,
            trusted.wrap_socket(plain, server_hostname=host) as connection,
        ):
            peer = connection.getpeercert() or {}
    except ssl.SSLCertVerificationError as problem:
        advice = "renew it, or name its authority in ca_file"
        return error(check, f"{host}: not trusted: {problem.verify_message}", advice)
    except OSError as problem:
        return warning(check, f"{host} cannot be reached: {problem}", "start the server, or correct its URL")
    days = (ssl.cert_time_to_seconds(str(peer["notAfter"])) - at) / _DAY_S
    return _valid_for(f"{host}: trusted", days)


def _valid_for(what: str, days: float) -> Finding:
    found = f"{what}, ends in {days:.0f} days"
    return ok("certificates", found) if days > _SOON_DAYS else warning("certificates", found, "renew it")
