"""Checks of the section ``gateway`` of the deployment file."""

from __future__ import annotations

import re
from ipaddress import ip_network

from policy.config.convert import require
from policy.config.deployment import GatewayConfig

# As browsers send it.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|[0-9A-Fa-f:]+")


def check_gateway(gateway: GatewayConfig) -> None:
    """Check what the types do not say; raises :class:`policy.errors.ConfigError`."""
    for i, name in enumerate(gateway.admin_allowed_hosts):
        good = HOST.fullmatch(name)
        require(good, f"gateway.admin_allowed_hosts[{i}]", name, "a host name or an address, without a port")
    for i, origin in enumerate(gateway.cors):
        expected = "SCHEME://HOST[:PORT] in lower case without a path, or '*'"
        require(origin == "*" or _ORIGIN.fullmatch(origin), f"gateway.cors[{i}]", origin, expected)
    for i, proxy in enumerate(gateway.trusted_proxies):
        expected = "an address, or a network such as 10.0.0.0/8"
        require(is_network(proxy), f"gateway.trusted_proxies[{i}]", proxy, expected)
    if (admin_tls := gateway.admin_tls) is not None:
        cert, key = admin_tls.client_cert_file, admin_tls.client_key_file
        expected = "both of client_cert_file and client_key_file, or none"
        require((cert is None) == (key is None), "gateway.admin_tls.client_key_file", key, expected)
        wanted = cert is None or admin_tls.client_ca_file is not None
        require(wanted, "gateway.admin_tls.client_cert_file", cert, "nothing without client_ca_file")
    base_s, max_s = gateway.eject.base_s, gateway.eject.max_s
    expected = f"at most gateway.eject.max_s = {max_s:g}"
    require(base_s <= max_s, "gateway.eject.base_s", base_s, expected)
    window_s, timeout_s = gateway.coalesce.window_s, gateway.queue_timeout_s
    expected = f"less than gateway.queue_timeout_s = {timeout_s:g}"
    require(window_s < timeout_s, "gateway.coalesce.window_s", window_s, expected)


def is_network(entry: str) -> bool:
    """Whether ``entry`` is an address or a network."""
    try:
        ip_network(entry, strict=False)
    except ValueError:
        return False
    return True
