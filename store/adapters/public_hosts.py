"""Downloads from public addresses alone, for sources that were given over HTTP.

A URL could otherwise make this machine fetch from services that trust its address, such as a cloud's
metadata. The addresses that a name resolves to are checked, again for each redirect, and the connection is
made to one of them: a second resolution might give another.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.request import getproxies

import httpx

from policy.deployment_file.gateway_checks import is_network

REDIRECTS = 5
_GLOBAL_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")
# Global by their numbers: IANA's special purposes (Oracle's metadata among them), and Azure's host services.
_SPECIAL = (ip_network("192.0.0.0/24"), ip_network("168.63.129.16/32"))


class NotPublic(Exception):
    """A host has an address that is not public, and is not allowed."""


class PublicHosts:
    """Public addresses, and ``private``: names of hosts, addresses, and networks such as 10.0.0.0/8."""

    def __init__(self, private: Iterable[str]) -> None:
        self._names = frozenset(entry.lower() for entry in private)
        self._networks = [ip_network(entry, strict=False) for entry in self._names if is_network(entry)]

    def lists(self, host: str) -> bool:
        """Whether ``host`` is listed by its name."""
        return host.lower() in self._names

    def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of ``host``; raises :class:`NotPublic` unless all are allowed, and ``OSError``."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        if not self.lists(host) and not all(self._allows(ip_address(each)) for each in addresses):
            raise NotPublic(
                f"expected a public host or one of the model's adapters.private_hosts, got {host}"
            )
        return addresses

    def _allows(self, address: IPv4Address | IPv6Address) -> bool:
        return is_public(address) or any(address in network for network in self._networks)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether ``address`` is reached over the internet and belongs to no special use."""
    if isinstance(address, IPv4Address):
        special = address.is_multicast or any(address in network for network in _SPECIAL)
        return address.is_global and not special
    within = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
        within = IPv4Address(int(address) & 0xFFFFFFFF)
    if within is not None:
        return is_public(within)
    return address.is_global and address in _GLOBAL_UNICAST


def client(hosts: PublicHosts, timeout: httpx.Timeout) -> httpx.Client:
    """A client that raises :class:`NotPublic` instead of sending a request to a host that is not allowed.

    Where the environment names a proxy, that makes the connections, and may be the only one to know a name:
    the addresses that are known here are checked all the same.
    """
    if not getproxies().keys() & {"http", "https", "all"}:
        return httpx.Client(
            timeout=timeout, follow_redirects=True, max_redirects=REDIRECTS, transport=_Checked(hosts)
        )

    def check(request: httpx.Request) -> None:
        try:
            hosts.resolve(*_target(request))
        except OSError:  # the proxy may know it
            return

    return httpx.Client(
        timeout=timeout, follow_redirects=True, max_redirects=REDIRECTS, event_hooks={"request": [check]}
    )


class _Checked(httpx.BaseTransport):
    """Connects to the addresses that were checked."""

    def __init__(self, hosts: PublicHosts) -> None:
        self._hosts = hosts
        # Connections are not kept: two hosts may have one address, but not one certificate.
        self._direct = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        host, port = _target(request)
        try:
            *others, last = self._hosts.resolve(host, port)
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        extensions = {**request.extensions, "sni_hostname": host}
        for address in others:
            try:
                return self._send(request, address, extensions)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return self._send(request, last, extensions)

    def close(self) -> None:
        self._direct.close()

    def _send(self, request: httpx.Request, address: str, extensions: Mapping[str, object]) -> httpx.Response:
        url = request.url.copy_with(host=address)
        return self._direct.handle_request(
            httpx.Request(
                request.method, url, headers=request.headers, stream=request.stream, extensions=extensions
            )
        )


def _target(request: httpx.Request) -> tuple[str, int]:
    url = request.url
    return url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80)
