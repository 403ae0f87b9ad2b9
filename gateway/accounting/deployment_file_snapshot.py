"""Models and tenants that the deployment file declares, which changes of keys are checked against."""

from __future__ import annotations

import threading
from typing import NamedTuple

from policy.config.tenancy import Tenant
from policy.deployment_file.parse import parse
from policy.errors import PreconditionFailed
from store.state_dir import StateDir
from store.watched_files import WatchedFiles


class DeploymentFileSnapshot(NamedTuple):
    """``models`` is ``None`` where no deployment was ever started; ``database`` is its URL.

    ``controller`` is the address of the controller, empty without one.
    """

    database: str
    tenants: dict[str, Tenant]
    models: frozenset[str] | None
    controller: str = ""


class DeploymentFileReader:
    """The deployment file in the state directory, read again when it changes; safe for all threads."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._reading = threading.Lock()
        self._file = WatchedFiles(state.deployment_path)
        self._declared = DeploymentFileSnapshot(state.database_url(""), {}, None)

    def get(self) -> DeploymentFileSnapshot:
        """What is declared now; raises :class:`policy.errors.ConfigError` for an invalid file."""
        with self._reading:
            if self._file.changed() and self._state.deployment_path.exists():
                self._declared = self._read()
                self._file.were_read()
            return self._declared

    def _read(self) -> DeploymentFileSnapshot:
        raw = self._state.load(self._state.deployment_path, dict[str, object])
        if raw is None:
            raise PreconditionFailed(f"{self._state.deployment_path} was removed while it was read")
        deployment = parse(raw)
        return DeploymentFileSnapshot(
            self._state.database_url(deployment.store),
            {tenant.name: tenant for tenant in deployment.tenants},
            frozenset(spec.name for spec in deployment.models),
            deployment.cluster.controller if deployment.needs_controller else "",
        )
