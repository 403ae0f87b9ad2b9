"""A gRPC port over TLS: certificate files that do not fit, and such that change under it."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.grpc_server.port import GrpcServer
from gateway.telemetry.structured_log import StructuredLog
from policy.config.grpc_ports import GrpcPort
from policy.config.tls import AdminTls
from policy.errors import ConfigError
from tests.gateway.test_worker_tls import take
from tests.ports import free_ports
from tests.store.test_tls_files import pair

PATIENCE_S = 10.0


@asynccontextmanager
async def served(config: GrpcPort, log: io.StringIO) -> AsyncIterator[None]:
    """An echo at the port."""

    async def echo(request: bytes, _context: Any) -> bytes:
        return request

    handlers = grpc.method_handlers_generic_handler("t", {"E": grpc.unary_unary_rpc_method_handler(echo)})
    server = GrpcServer("endpoint_picker", config, handlers, StructuredLog(0, log))
    await server.start()
    try:
        yield
    finally:
        await server.drain(0)


def client_credentials(trusted: AdminTls, own: AdminTls | None) -> Any:
    mine = (Path(own.key_file).read_bytes(), Path(own.cert_file).read_bytes()) if own else (None, None)
    return grpc.ssl_channel_credentials(Path(trusted.cert_file).read_bytes(), *mine)


async def asks(port: int, trusted: AdminTls, own: AdminTls | None = None) -> bool:
    """Whether a new connection that trusts this certificate, with an ``own`` one, is served."""
    credentials = client_credentials(trusted, own)
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=alone) as channel:
        try:
            answer = await channel.unary_unary("/t/E")(b"hello", timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return bool(answer == b"hello")


async def test_a_new_certificate_is_taken_and_one_that_does_not_fit_is_not(tmp_path: Path) -> None:
    mine, old, new, client = (pair(tmp_path / f"{name}.pem") for name in ("mine", "old", "new", "client"))
    take(old, mine, "cert_file", "key_file")
    (port,), log = free_ports(1), io.StringIO()
    config = GrpcPort(
        port=port, cert_file=mine.cert_file, key_file=mine.key_file, client_ca_file=client.cert_file
    )
    async with served(config, log):
        assert await asks(port, old, client)
        assert not await asks(port, old), "without a client certificate"
        assert not await asks(port, new, client)
        take(new, mine, "cert_file")  # whose key is another
        assert await asks(port, old, client)
        assert log.getvalue().count("certificate_refused") == 1
        take(new, mine, "key_file")
        assert await asks(port, new, client)
        assert not await asks(port, old, client)
        assert log.getvalue().count("certificate_read") == 1


async def test_files_that_do_not_fit_are_named_at_the_start(tmp_path: Path) -> None:
    mine, other = pair(tmp_path / "mine.pem"), pair(tmp_path / "other.pem")
    config = GrpcPort(port=1, cert_file=mine.cert_file, key_file=other.key_file)
    with pytest.raises(ConfigError, match=r"endpoint_picker\.key_file: got"):
        async with served(config, io.StringIO()):
            pass
