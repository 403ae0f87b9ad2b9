"""Reports on the ledger: sums of usage, and how far the ledger is behind, as metrics.

The metrics are in the files that the gateway workers of the host are scraped with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy import Connection

from gateway.telemetry.metric_families import MetricFamilies
from gateway.telemetry.metric_files import MetricFiles
from policy.config.convert import prepare_decoders, require
from policy.tenancy.price import NANO
from policy.wire.usage_query import LedgerStatus, UsageBy, UsageQuery, UsageRow
from store.tenancy import ledger

_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_COLUMNS = {by: "key_id" if by is UsageBy.KEY else by.value for by in UsageBy}
_PLAIN = tuple(name for name in ledger.COUNTS if name != "cost_nano")
prepare_decoders(UsageQuery)


def query_of(given: dict[str, str]) -> UsageQuery:
    """The query in a URL, where ``by`` is separated by commas; raises :class:`policy.errors.ConfigError`."""
    by = tuple(given.pop("by", UsageBy.TENANT).split(","))
    known = len(set(by)) == len(by) and set(by) <= set(UsageBy)
    require(known, "by", ",".join(by), f"some of {', '.join(UsageBy)}, separated by commas")
    for name in ("since", "until"):
        require(_DAY.fullmatch(given.get(name, "2026-01-31")), name, given.get(name), "a day like 2026-01-31")
    return msgspec.convert({**given, "by": by}, UsageQuery)


def rows(connection: Connection, query: UsageQuery) -> list[UsageRow]:
    """The sums that ``query`` asks for, in the order of what they are summed by."""
    columns = {_COLUMNS[by]: by.value for by in query.by}
    found = ledger.usage(connection, list(columns), tenant=query.tenant, since=query.since, until=query.until)
    return [_row(columns, sums) for sums in found]


def _row(columns: dict[str, str], sums: dict[str, Any]) -> UsageRow:
    counts = {name: sums[name] for name in _PLAIN}
    names = {name: sums[column] for column, name in columns.items()}
    return UsageRow(cost=sums["cost_nano"] / NANO, **counts, **names)


class LedgerMetrics:
    """The gauges of one accounting process, in ``directory``."""

    def __init__(self, directory: Path, status: Callable[[], LedgerStatus]) -> None:
        self._directory = directory
        # It counts nothing: other files would take room with each process that ends.
        self._files = MetricFiles(directory, os.getpid(), ("gauge_livesum", "gauge_livemax"))
        self._status = status
        self._gauges: dict[str, Gauge] = {}

    def publish(self) -> None:
        """Take the present numbers; raises :class:`OSError` where there is no room for them."""
        if not self._gauges:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.reserve(models=0)
            declared = MetricFamilies(CollectorRegistry())
            self._gauges = {
                "waiting": declared.gauge("tidegate_ledger_waiting_requests"),
                "behind_s": declared.gauge("tidegate_ledger_behind_seconds", "livemax"),
                "lost": declared.gauge("tidegate_ledger_lost_requests"),
            }
        status = self._status()
        for name, gauge in self._gauges.items():
            gauge.set(getattr(status, name))
