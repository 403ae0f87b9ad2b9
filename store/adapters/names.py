"""Which names adapters have and what those stand for.

Every change is one transaction: it is there whole or not at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, delete, select

from policy.errors import AdapterRefused, AdapterUnknown, TargetError
from policy.wire.catalog import DIGEST, NAME, Alias, Catalog, Version
from store.adapters.rows import (
    AdapterRow,
    erase,
    load,
    next_revision,
    retire,
    retired,
    revision,
    save,
    versions,
)
from store.adapters.validate import AdapterFacts
from store.database import Database

DOCUMENT = "document"
API = "api"
# What a name keeps for pinning and going back.
KEPT_VERSIONS = 16
KEPT_HISTORY = 16


class NewVersion(NamedTuple):
    """A stored adapter that a name shall stand for, with its share if there are several."""

    digest: str
    facts: AdapterFacts
    source: str
    weight: float = 1.0


class _Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What the document said of a name: digests with their weights, and tenants if it said any of them."""

    content: tuple[tuple[str, float], ...]
    tenants: tuple[str, ...] | None


class AdapterNames:
    """The aliases of all models in the database at ``url``; for any number of threads and processes.

    Everything raises :class:`policy.errors.Unreachable` when the database does not answer.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        """Raises as :class:`store.database.Database` does."""
        self._database = Database(url)
        self._clock = clock

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def catalog(self, epoch: float, version: int) -> Catalog:
        """All aliases at this instant."""
        with self._database.reading() as connection:
            found = load(connection)
        return Catalog(epoch=epoch, version=version, aliases=tuple(record.alias for record in found))

    def revision(self) -> int:
        """Grows with every change of any name."""
        with self._database.reading() as connection:
            return revision(connection)

    def declared(self) -> set[tuple[str, str]]:
        """Model and name of the aliases that the document declared."""
        with self._database.reading() as connection:
            return {
                (record.alias.model, record.alias.name)
                for record in load(connection)
                if record.origin == DOCUMENT
            }

    def add(
        self,
        model: str,
        name: str,
        digest: str,
        facts: AdapterFacts,
        source: str,
        *,
        tenants: Collection[str] | None = None,
        origin: str = API,
    ) -> Alias:
        """Let the name stand for this adapter alone; see :meth:`put`."""
        return self.put(model, name, [NewVersion(digest, facts, source)], tenants=tenants, origin=origin)

    def put(
        self,
        model: str,
        name: str,
        candidates: Sequence[NewVersion],
        *,
        tenants: Collection[str] | None = None,
        origin: str = API,
    ) -> Alias:
        """Let the name stand for ``candidates`` by their weights; a new one if there was none.

        A digest that the name has already keeps its number. ``tenants`` of ``None`` leaves them as they are.
        What changes nothing is no change; nor is it when the document declares the content, or the tenants,
        that it declared last, so that a restart does not undo what was done since. Raises
        :class:`policy.errors.AdapterRefused` (``name``) and :class:`policy.errors.TargetError` for weights
        that are none.
        """
        check_name(name)
        if not candidates or not all(DIGEST.fullmatch(each.digest) for each in candidates):
            raise ValueError(f"{candidates!r}: expected at least one, each with the sha256 of its content")
        with self._database.writing() as connection:
            before = _find(connection, model, name)
            at = self._clock()
            kept, split = _numbered(before.alias.versions if before else (), candidates, at)
            saying = _declaration(candidates, tenants) if origin == DOCUMENT else None
            said = _declared(before)
            if before is None:
                alias = Alias(model=model, name=name, revision=0, versions=kept, split=split, at=at)
                after = AdapterRow(alias, origin, "", ())
            elif saying and said and saying.content == said.content:
                after = before
            else:
                after = _standing_for(before, split, kept)
            if saying:
                after = after._replace(origin=origin, declared=msgspec.json.encode(saying).decode())
            if tenants is not None and not (saying and said and saying.tenants == said.tenants):
                alias = msgspec.structs.replace(after.alias, tenants=tuple(sorted(set(tenants))))
                after = after._replace(alias=alias)
            return self._keep(connection, before, after)

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        """Let the name stand for several of its versions, by number; 0 leaves one out.

        Raises :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` for a number that
        it does not have or weights that are none.
        """
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            for number in weights:
                if before.alias.version(number) is None:
                    known = ", ".join(f"v{version.number}" for version in before.alias.versions)
                    raise TargetError(f"{name} has no version v{number}; it has {known}")
            return self._keep(connection, before, _standing_for(before, _weighed(weights)))

    def rollback(self, model: str, name: str) -> Alias:
        """Let the name stand for what it stood for before; twice goes further back.

        Raises :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` where there is
        nothing before.
        """
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            if not before.history:
                raise TargetError(f"{name} stands for the first that it stood for, or the first that is kept")
            alias = msgspec.structs.replace(before.alias, split=before.history[-1])
            return self._keep(connection, before, before._replace(alias=alias, history=before.history[:-1]))

    def remove(self, model: str, name: str) -> None:
        """Forget the name and its versions; raises :class:`policy.errors.AdapterUnknown`."""
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            erase(connection, model, name)
            next_revision(connection)
            retire(connection, (version.digest for version in before.alias.versions), self._clock())

    def unused_digests(self, stored: Collection[str], older_s: float) -> set[str]:
        """Those of ``stored`` that no version has, nor had in the last ``older_s`` seconds."""
        before = self._clock() - older_s
        with self._database.writing() as connection:
            connection.execute(delete(retired).where(retired.c.at < before))
            used = connection.execute(select(versions.c.digest).union(select(retired.c.digest))).scalars()
            return set(stored).difference(used)

    def _keep(self, connection: Connection, before: AdapterRow | None, after: AdapterRow) -> Alias:
        if before is not None and after == before:
            return before.alias
        at = self._clock()
        alias = msgspec.structs.replace(after.alias, revision=next_revision(connection), at=at)
        save(connection, after._replace(alias=alias))
        former = {version.digest for version in before.alias.versions} if before else set()
        retire(connection, former ^ {version.digest for version in alias.versions}, at)
        return alias


def check_name(name: str) -> None:
    """Raises :class:`policy.errors.AdapterRefused` (``name``) for one that no adapter can have."""
    if NAME.fullmatch(name) is None:
        raise AdapterRefused("name", f"{name!r:.100} is no name of an adapter; expected {NAME.pattern}")


def _find(connection: Connection, model: str, name: str) -> AdapterRow | None:
    return next(iter(load(connection, model, name)), None)


def _known(connection: Connection, model: str, name: str) -> AdapterRow:
    found = _find(connection, model, name)
    if found is None:
        raise AdapterUnknown(f"there is no adapter {name!r:.100} on {model!r:.100}")
    return found


def _numbered(
    kept: tuple[Version, ...], candidates: Sequence[NewVersion], at: float
) -> tuple[tuple[Version, ...], tuple[tuple[int, float], ...]]:
    """The versions with those of ``candidates`` that are new, and the shares of all candidates."""
    by_digest = {version.digest: version for version in kept}
    weights: dict[int, float] = {}
    for digest, facts, source, weight in candidates:
        if digest not in by_digest:
            number = max((version.number for version in by_digest.values()), default=0) + 1
            by_digest[digest] = Version(
                number=number, digest=digest, rank=facts.rank, size=facts.size, source=source, at=at
            )
        number = by_digest[digest].number
        weights[number] = weights.get(number, 0.0) + weight
    return tuple(sorted(by_digest.values(), key=lambda version: version.number)), _weighed(weights)


def _weighed(weights: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(
        weights.values()
    ):
        raise TargetError(f"the weights are {dict(weights)!r:.200}; expected numbers from 0, one above it")
    return tuple((number, float(weight)) for number, weight in sorted(weights.items()) if weight > 0)


def _standing_for(
    before: AdapterRow, split: tuple[tuple[int, float], ...], kept: tuple[Version, ...] | None = None
) -> AdapterRow:
    """``before`` with another split, and what it was until now in its history."""
    found = before.alias.versions if kept is None else kept
    if split == before.alias.split:
        return before._replace(alias=msgspec.structs.replace(before.alias, versions=found))
    past = (*before.history, before.alias.split)[-KEPT_HISTORY:]
    # What is served stays, what was until now, and the latest; a past that names what goes is forgotten.
    served = {number for number, _ in (*split, *past[-1])}
    latest = [version.number for version in found if version.number not in served]
    stay = served | set(latest[max(0, len(found) - KEPT_VERSIONS) :])
    return before._replace(
        alias=msgspec.structs.replace(
            before.alias, split=split, versions=tuple(version for version in found if version.number in stay)
        ),
        history=tuple(each for each in past if all(number in stay for number, _ in each)),
    )


def _declared(record: AdapterRow | None) -> _Declared | None:
    if record is None or not record.declared:
        return None
    return msgspec.json.decode(record.declared, type=_Declared)


def _declaration(candidates: Sequence[NewVersion], tenants: Collection[str] | None) -> _Declared:
    content = tuple(sorted((each.digest, each.weight) for each in candidates))
    return _Declared(content=content, tenants=None if tenants is None else tuple(sorted(set(tenants))))
