"""Who a client is behind proxies: only the headers of trusted ones count, back to the first that is not."""

from __future__ import annotations

import pytest

from gateway.http.forwarded import TrustedProxies

PROXY = ("10.0.0.9", 4000)


@pytest.mark.parametrize(
    ("peer", "hops", "client"),
    [
        (PROXY, ["203.0.113.7"], ("203.0.113.7", 0)),
        (("203.0.113.1", 5), ["198.51.100.1"], ("203.0.113.1", 5)),  # no proxy of ours
        (PROXY, [], PROXY),
        (PROXY, ["1.2.3.4, 203.0.113.7", "10.1.1.1"], ("203.0.113.7", 0)),  # the first is the client's claim
        (PROXY, ["203.0.113.7, unknown, 10.1.1.1"], ("10.1.1.1", 0)),
        (PROXY, ["10.1.1.1"], ("10.1.1.1", 0)),
        (PROXY, ["203.0.113.7:5555"], ("203.0.113.7", 0)),
        (PROXY, ["[2001:db8::1]:443"], ("2001:db8::1", 0)),
        (("::ffff:10.0.0.9", 1), ["203.0.113.7"], ("203.0.113.7", 0)),
        (("fe80::1%eth0", 1), ["203.0.113.7"], ("203.0.113.7", 0)),
        (("not an address", 1), ["203.0.113.7"], ("not an address", 1)),
        (None, ["203.0.113.7"], None),
    ],
)
def test_the_client_is_the_last_hop_outside_of_the_trusted_networks(
    peer: tuple[str, int] | None, hops: list[str], client: tuple[str, int] | None
) -> None:
    proxies = TrustedProxies()
    headers = [(b"x-forwarded-for", hop.encode()) for hop in hops]
    assert proxies.sender(peer, "http", headers) == (peer, "http")
    proxies.read(["10.0.0.0/8", "fe80::/10"])
    assert proxies.sender(peer, "http", headers)[0] == client


def test_the_scheme_is_that_of_the_nearest_proxy() -> None:
    proxies = TrustedProxies()
    proxies.read(["10.0.0.0/8"])
    for given, scheme in (("https", "https"), ("http, HTTPS", "https"), ("ftp", "http"), ("", "http")):
        assert proxies.sender(PROXY, "http", [(b"x-forwarded-proto", given.encode())])[1] == scheme
