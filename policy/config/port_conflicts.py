"""The ports that a deployment listens on, and those that a local Ray head takes beside them."""

from __future__ import annotations

import re
from typing import NamedTuple

from policy.config.convert import require
from policy.config.deployment import Deployment, GatewayConfig

# Ray's own default, which the head is started with.
RAY_WORKERS = (10_002, 19_999)

_LOOPBACK = "127.0.0.1"
_LOOPBACK_V4 = re.compile(r"127(\.\d{1,3}){3}")
# Hosts by which all addresses of the machine are bound.
WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class ListenAddress(NamedTuple):
    """An address that a process of the deployment listens on, and the ``path`` of its port in the file."""

    path: str
    host: str
    port: int

    def clashes_with(self, other: ListenAddress) -> bool:
        """Whether both cannot be bound on one machine."""
        mine, its = (_LOOPBACK if each.host == "localhost" else each.host for each in (self, other))
        return self.port == other.port and (mine == its or mine in WILDCARDS or its in WILDCARDS)


def listeners(deployment: Deployment, *, ray: bool) -> tuple[ListenAddress, ...]:
    """The listeners on this machine, which a joined cluster has none of; those of Ray only with ``ray``."""
    gateway, cluster = deployment.gateway, deployment.cluster
    found = [
        ListenAddress("gateway.port", gateway.host, gateway.port),
        ListenAddress("gateway.admin_port", gateway.admin_host, gateway.admin_port),
    ]
    for name, grpc in deployment.grpc_ports.items():
        found.append(ListenAddress(f"{name}.port", grpc.host, grpc.port))
    starts_ray = ray and _starts_ray(deployment)
    if starts_ray or (deployment.needs_controller and not (ray and deployment.deploys)):
        # Those of controllers that elect their leader may be on other machines.
        for address in cluster.controllers if cluster.election is None else ():
            host, _, port = address.rpartition(":")
            found.append(ListenAddress("cluster.controller", host.strip("[]"), int(port)))
        if starts_ray:
            # Ray listens on loopback or on every interface.
            gcs = _LOOPBACK if is_loopback(cluster.node_ip) else "0.0.0.0"
            found.append(ListenAddress("cluster.gcs_port", gcs, cluster.gcs_port))
            found.append(ListenAddress("cluster.dashboard_port", _LOOPBACK, cluster.dashboard_port))
    return tuple(found)


def check_ports(deployment: Deployment) -> None:
    """Check the ports against each other and Ray's; raises :class:`policy.errors.ConfigError`."""
    found = listeners(deployment, ray=True)
    first, last = RAY_WORKERS
    starts_ray = _starts_ray(deployment)
    for i, listener in enumerate(found):
        path, port = listener.path, listener.port
        for other in found[:i]:
            expected = f"a port other than {other.path} = {other.port}"
            require(not listener.clashes_with(other), path, port, expected)
        # A worker skips a port that is bound, as the gateway's are before the head starts.
        workers = starts_ray and not path.startswith("gateway.") and first <= port <= last
        require(not workers, path, port, f"a port other than {first} to {last}, which Ray's workers take")


def _starts_ray(deployment: Deployment) -> bool:
    """Whether a Ray head is started on this machine, where Ray is used."""
    return deployment.deploys and deployment.cluster.address == "local"


def may_be_open(gateway: GatewayConfig) -> bool:
    """Whether requests need no key while there is no tenant: on loopback, or if the file says so."""
    return gateway.allow_unauthenticated or is_loopback(gateway.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    return host in ("localhost", "::1") or _LOOPBACK_V4.fullmatch(host) is not None
