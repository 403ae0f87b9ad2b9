"""What the database holds of adapters: one record per name, read and written whole."""

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
    update,
)

from policy.wire.catalog import Alias, Version
from store.database import metadata

_TO_ALIAS = (["model", "name"], ["aliases.model", "aliases.name"])
_TO_VERSION = (
    ["model", "name", "number"],
    ["versions.model", "versions.name", "versions.number"],
)

aliases = Table(
    "aliases",
    metadata,
    Column("model", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("tenants", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("declared", Text, nullable=False),
    Column("at", Double, nullable=False),
)
versions = Table(
    "versions",
    metadata,
    Column("model", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("digest", Text, nullable=False, index=True),
    Column("rank", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("source", Text, nullable=False),
    Column("at", Double, nullable=False),
    ForeignKeyConstraint(*_TO_ALIAS, ondelete="CASCADE"),
    UniqueConstraint("model", "name", "digest"),
)
splits = Table(
    "splits",
    metadata,
    Column("model", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("weight", Double, nullable=False),
    ForeignKeyConstraint(*_TO_VERSION, ondelete="CASCADE"),
)
history = Table(
    "history",
    metadata,
    Column("model", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("split", Text, nullable=False),
    ForeignKeyConstraint(*_TO_ALIAS, ondelete="CASCADE"),
)
# Digests that no version has any more, and since when.
retired = Table(
    "retired",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("at", Double, nullable=False),
)
counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

Split = tuple[tuple[int, float], ...]


class AdapterRow(NamedTuple):
    """An alias and what only its keeper knows of it.

    ``origin`` is "document" or "api", ``declared`` what the document said of it last as JSON, and
    ``history`` what it stood for before, the latest last.
    """

    alias: Alias
    origin: str
    declared: str
    history: tuple[Split, ...]


def load(connection: Connection, model: str | None = None, name: str | None = None) -> list[AdapterRow]:
    """The records of all names, or of the one that is given, in the order of models and names."""

    def rows(table: Table, last: str = "name") -> Iterable[NamedTuple]:
        wanted = true() if model is None else and_(table.c.model == model, table.c.name == name)
        order = (table.c.model, table.c.name, table.c[last])
        return connection.execute(select(table).where(wanted).order_by(*order))  # type: ignore[return-value]

    kept: dict[tuple[str, str], list[Version]] = defaultdict(list)
    for row in rows(versions, "number"):
        fields = row._asdict()
        kept[fields.pop("model"), fields.pop("name")].append(Version(**fields))
    shares: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in rows(splits, "number"):
        at, number, weight = row[:2], row[2], row[3]
        shares[at].append((number, weight))
    past: dict[tuple[str, str], list[Split]] = defaultdict(list)
    for row in rows(history, "position"):
        past[row[:2]].append(msgspec.json.decode(row[3], type=Split))
    found = []
    for row in rows(aliases):
        fields = row._asdict()
        key = (fields["model"], fields["name"])
        origin, declared = fields.pop("origin"), fields.pop("declared")
        fields["tenants"] = msgspec.json.decode(fields["tenants"], type=tuple[str, ...])
        alias = Alias(**fields, versions=tuple(kept[key]), split=tuple(shares[key]))
        found.append(AdapterRow(alias, origin, declared, tuple(past[key])))
    return found


def save(connection: Connection, record: AdapterRow) -> None:
    """Write the record whole, in the place of any of this name."""
    alias = record.alias
    erase(connection, alias.model, alias.name)
    key = {"model": alias.model, "name": alias.name}
    tenants = msgspec.json.encode(alias.tenants).decode()
    connection.execute(
        insert(aliases).values(
            **key,
            revision=alias.revision,
            tenants=tenants,
            origin=record.origin,
            declared=record.declared,
            at=alias.at,
        )
    )
    connection.execute(insert(versions), [key | msgspec.to_builtins(version) for version in alias.versions])
    connection.execute(
        insert(splits), [{**key, "number": number, "weight": weight} for number, weight in alias.split]
    )
    if record.history:
        past = [msgspec.json.encode(split).decode() for split in record.history]
        connection.execute(
            insert(history), [{**key, "position": i, "split": split} for i, split in enumerate(past)]
        )


def erase(connection: Connection, model: str, name: str) -> None:
    """Take the record of this name away; what belongs to it goes with it."""
    connection.execute(delete(aliases).where(aliases.c.model == model, aliases.c.name == name))


def retire(connection: Connection, digests: Iterable[str], at: float) -> None:
    """Note of each of ``digests``, which a version had until now, since when none has it, if none has."""
    for digest in set(digests):
        connection.execute(delete(retired).where(retired.c.digest == digest))
        if connection.execute(select(versions.c.number).where(versions.c.digest == digest)).first() is None:
            connection.execute(insert(retired).values(digest=digest, at=at))


def next_revision(connection: Connection) -> int:
    """One more than any revision that there was."""
    connection.execute(
        update(counters).where(counters.c.name == "revision").values(value=counters.c.value + 1)
    )
    return revision(connection)


def revision(connection: Connection) -> int:
    """The largest revision of all names, also of those that are gone."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == "revision")).scalar_one())
