"""The controllers of a deployment, whose document this host follows: that of the one that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from policy.deployment_file.parse import parse
from policy.errors import TidegateError, Unauthorized, Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tidegate.deployment_file import DeploymentDocument

FOLLOW_EVERY_S = 1.0
_TIMEOUT_S = 3.0
_RETRY_S = 0.5


@dataclass
class RemoteDocumentFeed:
    """The controllers at ``addresses``, ``HOST:PORT[,HOST:PORT]``.

    ``gateway`` replaces values of the section ``gateway`` on this host, and ``addresses`` those of the
    document; ``None`` leaves it as it is, for the host of a controller.
    """

    state: StateDir
    addresses: str
    gateway: dict[str, Any] | None

    async def first_document(self, timeout_s: float, note: Callable[[str], None]) -> DeploymentDocument:
        """The deployment, or the last one that this host served if no controller answers in ``timeout_s``.

        Raises :class:`policy.errors.Unreachable` if there is neither, and
        :class:`policy.errors.Unauthorized` for another secret than the controller's.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self._document()
            except Unauthorized:
                raise
            except Unreachable as error:
                saved = self.state.load(self.state.deployment_path, dict[str, Any])
                if saved is not None:
                    note(f"{error}; this host serves as it did last")
                    return self._on_this_host(saved)
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def follow(
        self, current: object, take: Callable[[DeploymentDocument], None], note: Callable[[str], None]
    ) -> None:
        """Call ``take`` with each new deployment, until cancelled; again if it raises ``OSError``."""
        answers = stored = True
        while True:
            await asyncio.sleep(FOLLOW_EVERY_S)
            try:
                document = await self._document()
            except (TidegateError, OSError) as error:
                if answers:
                    note(f"{error}; this host serves with what it knows")
                answers = False
                continue
            if not answers:
                note(f"a controller at {self.addresses} answers again")
            answers = True
            if document.raw == current:
                continue
            try:
                take(document)
            except OSError as error:
                # As on a full disk, which may have room again.
                if stored:
                    note(f"the new deployment file cannot be stored: {error}")
                stored = False
            else:
                current, stored = document.raw, True

    async def _document(self) -> DeploymentDocument:
        return self._on_this_host(await asyncio.to_thread(self._fetch))

    def _fetch(self) -> dict[str, Any]:
        client = ControllerClient(self.addresses, self.state.secret(), timeout_s=_TIMEOUT_S)
        try:
            return client.document()
        finally:
            client.close()

    def _on_this_host(self, raw: dict[str, Any]) -> DeploymentDocument:
        """The deployment with this host's addresses and this way to the controllers."""
        changed = dict(raw)
        if self.gateway is not None:
            changed["gateway"] = {**raw.get("gateway", {}), **self.gateway}
            changed["cluster"] = {**raw.get("cluster", {}), "controller": self.addresses}
        return DeploymentDocument(raw=changed, deployment=parse(changed))
