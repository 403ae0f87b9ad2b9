"""Heartbeats of replica hosts, and the orders that the controller answers them with."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from policy.config.control import ControlConfig
from policy.types import Replica
from policy.wire.adapter_catalog import served_name
from policy.wire.controller_reports import EngineReport, GpuReport

# A host sends a heartbeat at each change, and at least this often.
HEARTBEAT_PERIOD_S = 0.5


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an adapter: its ``name`` and whole ``digest``."""

    name: str
    digest: str

    @property
    def served(self) -> str:
        """What engines and answers call it."""
        return served_name(self.name, self.digest)


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica did with one adapter since its last report.

    ``name`` and ``digest`` are those of :class:`AdapterRef`. ``requests`` counts arrivals, ``found``
    those that found the adapter loaded, ``loads`` its loads, which took ``load_s`` seconds in sum. ``failed``
    is the error of the last load. Requests that ended used it for ``busy_s`` seconds in sum. ``waiting``
    counts the requests that wait for a slot now.
    """

    name: str
    digest: str
    requests: int = 0
    found: int = 0
    loads: int = 0
    failed: str = ""
    load_s: float = 0.0
    busy_s: float = 0.0
    waiting: int = 0

    def plus(self, later: AdapterUse) -> AdapterUse:
        """The sum with a ``later`` report on the same adapter."""
        return msgspec.structs.replace(
            later,
            requests=self.requests + later.requests,
            found=self.found + later.found,
            loads=self.loads + later.loads,
            load_s=self.load_s + later.load_s,
            # A successful load ends the failure before it.
            failed=later.failed if later.failed or later.loads else self.failed,
            busy_s=self.busy_s + later.busy_s,
        )


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of a replica host, sent every :data:`HEARTBEAT_PERIOD_S` and at each change."""

    replica: Replica
    uses: tuple[AdapterUse, ...] = ()
    engine: EngineReport | None = None
    gpus: GpuReport | None = msgspec.field(default=None, name="power")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The timeouts of a host that change while its engine runs; names as in the deployment file."""

    drain_timeout_s: float
    progress_timeout_s: float
    start_timeout_s: float

    @classmethod
    def of(cls, control: ControlConfig) -> Timeouts:
        """Those of a deployment file."""
        return cls(
            drain_timeout_s=control.mode.drain_timeout_s,
            progress_timeout_s=control.progress_timeout_s,
            start_timeout_s=control.start_timeout_s,
        )

    def within(self, control: ControlConfig) -> ControlConfig:
        """``control`` with these timeouts."""
        return msgspec.structs.replace(
            control,
            mode=msgspec.structs.replace(control.mode, drain_timeout_s=self.drain_timeout_s),
            progress_timeout_s=self.progress_timeout_s,
            start_timeout_s=self.start_timeout_s,
        )


class GpuCommand(StrEnum):
    """What an engine of a shared GPU group does.

    ``SERVE``: wake or start, and serve. ``MEASURE``: the same, but measure the time of a wake-up before the
    first request. ``WAIT``: others start first; then it serves. ``PREPARE``: start if it is not started,
    measure a wake-up, and sleep. ``SLEEP``: drain and sleep; a start ends.
    """

    SERVE = "serve"
    MEASURE = "measure"
    WAIT = "wait"
    PREPARE = "prepare"
    SLEEP = "sleep"


class HeartbeatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer to a heartbeat.

    ``hold`` are the adapters planned for the replica, the most valuable first. ``gpus`` is for an engine of a
    shared GPU group. ``timeouts`` are those of the configuration in force. ``None`` leaves the last value in
    force. A ``leave`` that is not empty is the reason why the replica must drain and be replaced. ``term`` is
    that of an elected controller, else 0: orders of a lower term than others before are refused.
    """

    hold: tuple[AdapterRef, ...] | None = None
    gpus: GpuCommand | None = None
    timeouts: Timeouts | None = None
    leave: str = ""
    term: int = 0
