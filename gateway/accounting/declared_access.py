"""What the deployment file declares: the models and tenants that changes of keys are checked against."""

from __future__ import annotations

import threading
from typing import NamedTuple

from policy.config.tenancy import Tenant
from policy.deployment_file.parse import parse
from policy.errors import PreconditionFailed
from store.state_dir import StateDir


class Declared(NamedTuple):
    """``models`` is ``None`` where no deployment was ever started; ``database`` is its URL.

    ``controller`` is the address of the controller, empty without one.
    """

    database: str
    tenants: dict[str, Tenant]
    models: frozenset[str] | None
    controller: str = ""


class DeclaredAccess:
    """The deployment file in the state directory, read again when it changes; safe for all threads."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._reading = threading.Lock()
        self._read_at = -1
        self._declared = Declared(state.database_url(""), {}, None)

    def get(self) -> Declared:
        """What is declared now; raises :class:`policy.errors.ConfigError` for an invalid file."""
        with self._reading:
            try:
                changed = self._state.deployment_path.stat().st_mtime_ns
            except FileNotFoundError:
                return self._declared
            if changed != self._read_at:
                self._declared = self._read()
                self._read_at = changed
            return self._declared

    def _read(self) -> Declared:
        raw = self._state.load(self._state.deployment_path, dict[str, object])
        if raw is None:
            raise PreconditionFailed(f"{self._state.deployment_path} was removed while it was read")
        deployment = parse(raw)
        return Declared(
            self._state.database_url(deployment.store),
            {tenant.name: tenant for tenant in deployment.tenants},
            frozenset(spec.name for spec in deployment.models),
            deployment.cluster.controller if deployment.needs_controller else "",
        )
