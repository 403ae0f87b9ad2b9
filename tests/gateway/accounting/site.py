"""An accounting process's database and API without the process, and the file that it writes for workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.accounting.access_snapshot_writer import AccessSnapshotWriter
from gateway.accounting.access_transaction import AccessDatabase
from gateway.accounting.app import build_app
from gateway.accounting.database_access import DatabaseAccess
from gateway.accounting.deployment_file_snapshot import DeploymentFileReader
from policy.wire.access_snapshot import SnapshotLine
from policy.wire.accounting_api import ACTOR_HEADER, ROLE_HEADER
from store.state_dir import StateDir
from tests.clock import Clock

DECLARED = "ab" * 32
DOCUMENT = {
    "models": [{"name": name, "engine": "external", "urls": [f"http://{name}.test"]} for name in ("m", "n")],
    "tenants": [{"name": "declared", "keys_sha256": [DECLARED], "rpm_limit": 7}],
}


class AccountingSite:
    """One host; several may share a database."""

    def __init__(self, root: Path, url: str, clock: Clock) -> None:
        self.state = StateDir(root).ensure()
        self._url = url
        self.declare()
        declared = DeploymentFileReader(self.state)
        self.database = DatabaseAccess(lambda: declared.get().database)
        self.access = AccessDatabase(self.database, declared, clock)
        self.snapshot = AccessSnapshotWriter(self.access, self.state)
        self.access.prepare = self.snapshot.prepare
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(self.access)),
            base_url="http://accounting",
            headers={ACTOR_HEADER: "alice", ROLE_HEADER: "admin"},
        )

    def declare(self, **sections: Any) -> None:
        """Apply a deployment file that has other ``sections``."""
        self.state.save(self.state.deployment_path, DOCUMENT | {"store": self._url} | sections)

    async def ask(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        answer = await self._http.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def file(self) -> list[SnapshotLine]:
        """The workers' file, decoded."""
        return msgspec.json.Decoder(SnapshotLine).decode_lines(self.state.access_path.read_bytes())
