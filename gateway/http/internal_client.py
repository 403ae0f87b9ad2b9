"""HTTP clients of Tidegate's own processes, for everything but requests and streams."""

from __future__ import annotations

import ssl

import httpx

from policy.wire.headers import SECRET_HEADER


def internal_client(
    secret: str, *, timeout: httpx.Timeout | float = 5.0, keepalive_connections: int = 0
) -> httpx.AsyncClient:
    """A client over plain HTTP: it reads no certificates, which takes as long as many requests."""
    return httpx.AsyncClient(
        headers={SECRET_HEADER: secret, "content-type": "application/json"},
        timeout=timeout,
        limits=httpx.Limits(max_keepalive_connections=keepalive_connections),
        trust_env=False,
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
