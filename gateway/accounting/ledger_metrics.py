"""How far the ledger is behind, in the metric files that the gateway workers of the host are scraped with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from gateway.telemetry.metric_families import MetricFamilies
from gateway.telemetry.metric_files import MetricFiles
from policy.wire.usage import LedgerStatus


class LedgerMetrics:
    """The gauges of one accounting process, in ``directory``."""

    def __init__(self, directory: Path, status: Callable[[], LedgerStatus]) -> None:
        self._directory = directory
        self._status = status
        self._gauges: dict[str, Gauge] = {}

    def publish(self) -> None:
        """Take the present numbers; raises :class:`OSError` where there is no room for them."""
        if not self._gauges:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            MetricFiles(self._directory, os.getpid()).reserve(models=0)
            declared = MetricFamilies(CollectorRegistry())
            self._gauges = {
                "waiting": declared.gauge("tidegate_ledger_waiting_requests"),
                "behind_s": declared.gauge("tidegate_ledger_behind_seconds", "livemax"),
                "lost": declared.gauge("tidegate_ledger_lost_requests"),
            }
        status = self._status()
        for name, gauge in self._gauges.items():
            gauge.set(getattr(status, name))
