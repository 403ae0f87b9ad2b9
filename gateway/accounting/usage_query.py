"""Answers to questions about usage: sums of the ledger, and how far it is behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.routing import BaseRoute

from gateway.accounting.app import route
from policy.config.convert import require
from policy.tenancy.price import NANO
from policy.wire.usage import LEDGER, USAGE, LedgerStatus, UsageBy, UsageQuery, UsageRow
from store.tenancy import ledger

Reading = Callable[[], AbstractContextManager[Connection]]

_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_COLUMNS = {by: "key_id" if by is UsageBy.KEY else by.value for by in UsageBy}
_PLAIN = tuple(name for name in ledger.COUNTS if name != "cost_nano")


def usage_routes(reading: Reading, status: Callable[[], LedgerStatus]) -> list[BaseRoute]:
    """The routes of the ledger; ``reading`` opens a transaction on its database."""

    def usage(request: Request, _body: bytes) -> object:
        query = query_of(dict(request.query_params))
        with reading() as connection:
            return rows(connection, query)

    return [route("GET", USAGE, usage), route("GET", LEDGER, lambda _request, _body: status())]


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
