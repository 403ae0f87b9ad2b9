"""The command line's client of the accounting process, or of the database where no process listens."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TypeVar

import httpx
import msgspec

from gateway.http.internal_client import NO_CERTIFICATES
from policy.errors import Unreachable
from policy.wire.accounting_api import LEDGER
from policy.wire.controller import error_of
from policy.wire.usage_query import LedgerStatus
from store.state_dir import StateDir

T = TypeVar("T")

TIMEOUT_S = 30.0
# A status is asked for when something hangs, perhaps this process.
STATUS_TIMEOUT_S = 2.0
_URL = "http://accounting"


class AccountingClient:
    """A blocking client; raises :class:`policy.errors.Unreachable` and the errors that it is answered.

    Without a process it does the same on the database: workers see it once an accounting process runs.
    """

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def ask(self, method: str, path: str, body: object = None, *, answer: type[T]) -> T:
        """The answer to one request, decoded."""
        content = b"" if body is None else msgspec.json.encode(body)
        response = self._over_socket(method, path, content)
        if response is None:
            response = asyncio.run(self._on_database(method, path, content))
        if response.status_code == 200:
            return msgspec.json.decode(response.content, type=answer)
        try:
            raise error_of(msgspec.json.decode(response.content)["error"])
        except (msgspec.DecodeError, LookupError) as error:
            raise Unreachable(f"the accounting process answered {response.status_code}") from error

    def ledger(self) -> LedgerStatus | None:
        """How far the ledger is behind; ``None`` if no process listens."""
        response = self._over_socket("GET", LEDGER, b"", STATUS_TIMEOUT_S)
        return None if response is None else msgspec.json.decode(response.content, type=LedgerStatus)

    def _over_socket(
        self, method: str, path: str, content: bytes, timeout_s: float = TIMEOUT_S
    ) -> httpx.Response | None:
        """The answer of the process, ``None`` if none listens."""
        socket = self._state.accounting_socket_path
        try:
            if socket.stat().st_uid != os.getuid():
                raise Unreachable(f"{socket} belongs to another user")
            transport = httpx.HTTPTransport(uds=os.fspath(socket), verify=NO_CERTIFICATES)
            with httpx.Client(transport=transport, base_url=_URL, timeout=timeout_s) as client:
                return client.request(method, path, content=content)
        except (FileNotFoundError, httpx.ConnectError):
            return None
        except httpx.HTTPError as error:
            raise Unreachable(f"the accounting process at {socket} does not answer: {error}") from error

    async def _on_database(self, method: str, path: str, content: bytes) -> httpx.Response:
        # The database takes long to import.
        from gateway.accounting.access_snapshot_writer import AccessSnapshotWriter  # noqa: PLC0415
        from gateway.accounting.access_transaction import AccessDatabase  # noqa: PLC0415
        from gateway.accounting.app import build_app  # noqa: PLC0415
        from gateway.accounting.database_access import DatabaseAccess  # noqa: PLC0415
        from gateway.accounting.deployment_file_snapshot import DeploymentFileReader  # noqa: PLC0415

        declared = DeploymentFileReader(self._state.ensure())
        database = DatabaseAccess(lambda: declared.get().database)
        access = AccessDatabase(database, declared, time.time)
        access.prepare = AccessSnapshotWriter(access, self._state).prepare
        transport = httpx.ASGITransport(build_app(access))
        try:
            async with httpx.AsyncClient(transport=transport, base_url=_URL) as client:
                return await client.request(method, path, content=content)
        finally:
            database.close()
