"""HTTP clients of Tidegate's own processes, for everything but requests and streams."""

from __future__ import annotations

import ssl
from importlib import import_module

import httpx

from policy.wire.headers import SECRET_HEADER

# httpx imports it with the first request, in 12 ms of one turn of the event loop.
import_module("anyio._backends._asyncio")
# Reading them takes as long as many requests.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def internal_client(
    secret: str,
    *,
    timeout: httpx.Timeout | float = 5.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client over plain HTTP, with a connection for each request: kept ones could be closed unnoticed.

    ``transport`` replaces the network, for tests.
    """
    return httpx.AsyncClient(
        headers={SECRET_HEADER: secret, "content-type": "application/json"},
        timeout=timeout,
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,
        verify=NO_CERTIFICATES,
        transport=transport,
    )
