"""The tables of adapters. A row of :class:`AdapterRow` is one name; it is read and written as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKeyConstraint,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    and_,
    delete,
    insert,
    select,
    true,
)

from policy.wire.adapter_catalog import Alias, CatalogVersion
from store.database import counter, increment, key_columns, metadata, required_columns

_TO_ALIAS = (["model", "name"], ["aliases.model", "aliases.name"])
_TO_VERSION = (["model", "name", "number"], ["versions.model", "versions.name", "versions.number"])


aliases = Table(
    "aliases",
    metadata,
    *key_columns(Text, "model", "name"),
    *required_columns(BigInteger, "revision"),
    *required_columns(Text, "tenants", "origin", "declared"),
    *required_columns(Double, "at"),
)
versions = Table(
    "versions",
    metadata,
    *key_columns(Text, "model", "name"),
    *key_columns(Integer, "number"),
    Column("digest", Text, nullable=False, index=True),
    *required_columns(Integer, "rank"),
    *required_columns(BigInteger, "size"),
    *required_columns(Text, "source"),
    *required_columns(Double, "at"),
    ForeignKeyConstraint(*_TO_ALIAS, ondelete="CASCADE"),
    UniqueConstraint("model", "name", "digest"),
)
splits = Table(
    "splits",
    metadata,
    *key_columns(Text, "model", "name"),
    *key_columns(Integer, "number"),
    *required_columns(Double, "weight"),
    ForeignKeyConstraint(*_TO_VERSION, ondelete="CASCADE"),
)
history = Table(
    "history",
    metadata,
    *key_columns(Text, "model", "name"),
    *key_columns(Integer, "position"),
    *required_columns(Text, "split"),
    ForeignKeyConstraint(*_TO_ALIAS, ondelete="CASCADE"),
)
# Digests that no version uses any more, with the instant since when.
retired = Table("retired", metadata, *key_columns(Text, "digest"), *required_columns(Double, "at"))

Split = tuple[tuple[int, float], ...]


class AdapterRow(NamedTuple):
    """An alias and its bookkeeping.

    ``origin`` is "document" or "api". ``declared`` is the last declaration in the document, as JSON.
    ``history`` are the former splits, the latest last.
    """

    alias: Alias
    origin: str
    declared: str
    history: tuple[Split, ...]


def load(connection: Connection, model: str | None = None, name: str | None = None) -> list[AdapterRow]:
    """The rows of all names, or of the given one, ordered by model and name."""

    def rows(table: Table, last: str = "name") -> Iterable[NamedTuple]:
        selected = true() if model is None else and_(table.c.model == model, table.c.name == name)
        order = (table.c.model, table.c.name, table.c[last])
        return connection.execute(select(table).where(selected).order_by(*order))  # type: ignore[return-value]

    kept: dict[tuple[str, str], list[CatalogVersion]] = defaultdict(list)
    for row in rows(versions, "number"):
        fields = row._asdict()
        kept[fields.pop("model"), fields.pop("name")].append(CatalogVersion(**fields))
    shares: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in rows(splits, "number"):
        shares[row[:2]].append((row[2], row[3]))
    past: dict[tuple[str, str], list[Split]] = defaultdict(list)
    for row in rows(history, "position"):
        past[row[:2]].append(msgspec.json.decode(row[3], type=Split))
    loaded = []
    for row in rows(aliases):
        fields = row._asdict()
        key = (fields["model"], fields["name"])
        origin, declared = fields.pop("origin"), fields.pop("declared")
        fields["tenants"] = msgspec.json.decode(fields["tenants"], type=tuple[str, ...])
        alias = Alias(**fields, versions=tuple(kept[key]), split=tuple(shares[key]))
        loaded.append(AdapterRow(alias, origin, declared, tuple(past[key])))
    return loaded


def save(connection: Connection, row: AdapterRow) -> None:
    """Write the whole row, replacing any of the same name."""
    alias = row.alias
    erase(connection, alias.model, alias.name)
    key = {"model": alias.model, "name": alias.name}
    tenants = msgspec.json.encode(alias.tenants).decode()
    connection.execute(
        insert(aliases).values(
            **key,
            revision=alias.revision,
            tenants=tenants,
            origin=row.origin,
            declared=row.declared,
            at=alias.at,
        )
    )
    connection.execute(insert(versions), [key | msgspec.to_builtins(version) for version in alias.versions])
    connection.execute(
        insert(splits), [{**key, "number": number, "weight": weight} for number, weight in alias.split]
    )
    if row.history:
        past = [msgspec.json.encode(split).decode() for split in row.history]
        connection.execute(
            insert(history), [{**key, "position": i, "split": split} for i, split in enumerate(past)]
        )


def erase(connection: Connection, model: str, name: str) -> None:
    """Delete the row of this name, with its versions, splits and history."""
    connection.execute(delete(aliases).where(aliases.c.model == model, aliases.c.name == name))


def retire(connection: Connection, digests: Iterable[str], at: float) -> None:
    """Record the instant at which each of ``digests`` went out of use, for those that no version uses."""
    for digest in set(digests):
        connection.execute(delete(retired).where(retired.c.digest == digest))
        if connection.execute(select(versions.c.number).where(versions.c.digest == digest)).first() is None:
            connection.execute(insert(retired).values(digest=digest, at=at))


def next_revision(connection: Connection) -> int:
    """Increment the revision and return it."""
    return increment(connection, "revision")


def revision(connection: Connection) -> int:
    """The highest revision of any name, removed ones included."""
    return counter(connection, "revision")
