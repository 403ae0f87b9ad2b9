"""A stand that the command line has started, and somebody who edits its document while it is watched."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from policy.errors import Unreachable
from tests.faults.live import MODEL
from tests.faults.scaled import Scaled
from tests.gateway.worker import PATIENCE_S, ROOT, until
from tests.ports import free_ports
from tidegate.supervisor.socket import SupervisorClient

KEY = "tg-editor"


class Commanded(Scaled):
    """``tidegate run --no-ray FILE`` with one tenant, and ``tidegate apply FILE --watch`` beside it."""

    def __init__(self, root: Path, spec: dict[str, Any], **sections: Any) -> None:
        super().__init__(root, spec, **sections)
        self.file = root / "deployment.yaml"
        port, admin_port = free_ports(2)
        self.url, self.admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        self.admin = httpx.AsyncClient(base_url=self.admin_url, timeout=PATIENCE_S, trust_env=False)
        self.headers = {"authorization": f"Bearer {KEY}"}
        tenant = {"name": "editor", "keys_sha256": [hashlib.sha256(KEY.encode()).hexdigest()]}
        self.document: dict[str, Any] = {
            "models": [{"name": MODEL, "engine": "sim", **spec}],
            "cluster": {"controller": self.address},
            "gateway": {"port": port, "admin_port": admin_port, "workers": 1, "drain_timeout_s": 2},
            "tenants": [tenant],
            **sections,
        }
        self._watching: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it serves, and its document is watched."""
        self.write_secret()
        self.save()
        self.plane = await self._tidegate("run", str(self.file), "--no-ray")
        await until(self._serves, "it is ready")
        self._watching = await self._tidegate("apply", str(self.file), "--watch")
        await until(lambda: "Nothing changes." in self.said("apply"), "it is watched")

    async def _tidegate(self, *arguments: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, "TIDEGATE_STATE_DIR": str(self.root)}
        with (self.root / f"{arguments[0]}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tidegate", *arguments,
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            )  # fmt: skip

    async def _serves(self) -> bool:
        assert self.plane is not None
        assert self.plane.returncode is None, self.said("run")
        with contextlib.suppress(Unreachable):
            return (await asyncio.to_thread(SupervisorClient(self.state).status)).phase == "ready"
        return False

    def said(self, command: str) -> str:
        """All that a command has printed."""
        return (self.root / f"{command}.log").read_text()

    def save(self) -> float:
        """Save the document as it is now; returns when."""
        self.file.write_text(yaml.safe_dump(self.document))
        return time.monotonic()

    async def took_s(self, saved_at: float, seen: Callable[[], Awaitable[bool]]) -> float:
        """How long after it was saved an edit is ``seen``."""
        await until(seen, "the edit is in force")
        return time.monotonic() - saved_at

    async def state_of_things(self) -> tuple[bytes, object, list[str]]:
        """The document in force, what is steered for, and the replicas."""
        replicas = (await self.tell("GET", "/fleet"))["replicas"]
        target = msgspec.to_builtins(self.target())
        return self.state.deployment_path.read_bytes(), target, sorted(one["id"] for one in replicas)

    async def close(self) -> None:
        for process, how in ((self._watching, signal.SIGINT), (self.plane, signal.SIGTERM)):
            if process is not None and process.returncode is None:
                process.send_signal(how)
                await process.wait()
        await super().close()
