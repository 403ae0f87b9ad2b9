"""The sender of a request that came through a proxy, by the ``X-Forwarded-`` headers of trusted ones.

Anyone can send these, so they count only where the other end of the connection is in a trusted network, and
only back to the first address outside of these networks: what stands before it, that client wrote itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

# Of a client: its address, and its port where it is known.
Address = tuple[str, int]


class TrustedProxies:
    """The networks of the deployment; without any, the other end of a connection is the client."""

    def __init__(self) -> None:
        self.trusted: tuple[IPv4Network | IPv6Network, ...] = ()

    def read(self, networks: Iterable[str]) -> None:
        """Take the networks of a new deployment."""
        self.trusted = tuple(ip_network(network, strict=False) for network in networks)

    def sender(
        self, peer: Address | None, scheme: str, headers: list[tuple[bytes, bytes]]
    ) -> tuple[Address | None, str]:
        """The client and its scheme, of a request from ``peer`` by ``scheme``."""
        if peer is None or not self._trusts(peer[0]):
            return peer, scheme
        client, hops = peer, []
        for name, value in headers:
            if name == b"x-forwarded-for":
                hops += value.decode("latin-1").split(",")
            elif name == b"x-forwarded-proto":
                given = value.rpartition(b",")[2].strip().lower()
                scheme = given.decode() if given in (b"http", b"https") else scheme
        for hop in reversed(hops):
            if (address := _address(hop.strip())) is None:
                break
            client = (address, 0)
            if not self._trusts(address):
                break
        return client, scheme

    def _trusts(self, address: str) -> bool:
        return _is_in(address, self.trusted)


@lru_cache(maxsize=1024)
def _is_in(address: str, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def _address(hop: str) -> str | None:
    """An address of ``X-Forwarded-For``, which may have a port; ``None`` for anything else."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ip_address(hop))
    except ValueError:
        return None
