"""Both ports over TLS: certificates that change under a running worker, and client certificates."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from policy.config.deployment import GatewayConfig
from policy.config.tls import AdminTls
from store.tls_files import client_context
from tests.gateway.worker import PATIENCE_S, Stack, admin_client, until
from tests.store.test_tls_files import pair
from tidegate.supervisor import readiness

pytestmark = pytest.mark.process


def take(source: AdminTls, into: AdminTls, *keys: str) -> None:
    """Replace files of one pair by those of another."""
    for key in keys:
        part = shutil.copy(getattr(source, key), f"{getattr(into, key)}.part")
        Path(part).replace(getattr(into, key))


async def test_both_ports_speak_tls_and_take_a_new_certificate(stack: Stack, tmp_path: Path) -> None:
    mine, old, new = (pair(tmp_path / f"{name}.pem") for name in ("mine", "old", "new"))
    take(old, mine, "cert_file", "key_file")
    admins = pair(tmp_path / "admins.pem")
    tls = {"cert_file": mine.cert_file, "key_file": mine.key_file}
    admin_tls = AdminTls(
        **tls,
        client_ca_file=admins.cert_file,
        client_cert_file=admins.cert_file,
        client_key_file=admins.key_file,
    )
    stack.gateway |= {
        "tls": tls,
        "admin_tls": {name: getattr(admin_tls, name) for name in admin_tls.__struct_fields__},
    }
    await stack.start_controller()
    await stack.admin.aclose()
    stack.admin = admin_client(
        stack.admin_url.replace("http", "https"), stack.root, client_context(admin_tls, "")
    )
    worker = await stack.start_worker()
    assert worker.stderr is not None
    await stack.serve("one")

    async def asks(trusted: AdminTls) -> int:
        url = stack.url.replace("http", "https")
        async with httpx.AsyncClient(verify=client_context(trusted, ""), trust_env=False) as client:
            return (await client.get(f"{url}/v1/models", timeout=PATIENCE_S)).status_code

    assert await asks(old) == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await asks(new)
    for url in (stack.url, stack.admin_url):  # plain HTTP
        with pytest.raises(httpx.RemoteProtocolError):
            await stack.http.get(f"{url}/readyz")
    without = admin_client(stack.admin_url.replace("http", "https"), stack.root, client_context(old, ""))
    async with without:  # without a client certificate
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await without.get("/readyz")
    # As `up` does.
    ports = {"port": int(stack.url.rpartition(":")[2]), "admin_port": int(stack.admin_url.rpartition(":")[2])}
    gateway = GatewayConfig(**ports, tls=mine, admin_tls=admin_tls)
    assert (await asyncio.to_thread(readiness.call, gateway, "/readyz", admin=True))[0] == 200

    take(new, mine, "cert_file")  # whose key is another
    while b"certificate_refused" not in await worker.stderr.readline():
        pass
    assert await asks(old) == 200
    take(new, mine, "key_file")

    async def taken() -> bool:
        try:
            return await asks(new) == 200
        except httpx.ConnectError:
            return False

    await until(taken, "the new certificate is in force")
