"""Adapter names: the aliases and their versions, splits and histories, in the database.

Every change is one transaction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, delete, select

from policy.errors import AdapterRefused, AdapterUnknown, TargetError
from policy.wire.adapter_catalog import DIGEST, NAME, Alias, CatalogSnapshot, CatalogVersion
from store.adapters.database_tables import (
    AdapterRow,
    Split,
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
# How many versions and former splits a name keeps, for pinning and rollback.
KEPT_VERSIONS = 16
KEPT_HISTORY = 16


class NewVersion(NamedTuple):
    """A stored adapter to assign to a name, with its weight if there are several.

    ``source`` is what people see of its source; ``identity`` tells it from all others, if more is needed
    (:func:`store.adapters.fetch_context.identity`).
    """

    digest: str
    facts: AdapterFacts
    source: str
    weight: float = 1.0
    identity: str = ""


class _Declared(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a name: digests with their weights, and tenants if declared.

    ``sources`` are the digests of all sources that were declared for the name, by their identities, as far as
    these versions are kept. Earlier versions of Tidegate wrote none.
    """

    content: tuple[tuple[str, float], ...]
    tenants: tuple[str, ...] | None
    sources: dict[str, str] = {}


_decode_declared = msgspec.json.Decoder(_Declared).decode


class AdapterAliases:
    """The aliases of all models in the database at ``url``; for any number of threads and processes.

    Every method raises :class:`policy.errors.Unreachable` if the database does not answer.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(url)
        self._clock = clock

    def close(self) -> None:
        self._database.close()

    def catalog(self, epoch: float, version: int) -> CatalogSnapshot:
        """All aliases now."""
        with self._database.reading() as connection:
            found = load(connection)
        return CatalogSnapshot(epoch=epoch, version=version, aliases=tuple(record.alias for record in found))

    def revision(self) -> int:
        """A number that grows with every change of any name."""
        with self._database.reading() as connection:
            return revision(connection)

    def declared(self) -> dict[tuple[str, str], dict[str, str]]:
        """The aliases that the deployment file declared, by model and name: the digests of their sources.

        A digest is the one of the last declaration of its source, by the source's identity.
        """
        with self._database.reading() as connection:
            return {
                (record.alias.model, record.alias.name): _sources(record)
                for record in load(connection)
                if record.origin == DOCUMENT
            }

    def put(
        self,
        model: str,
        name: str,
        candidates: Sequence[NewVersion],
        *,
        tenants: Collection[str] | None = None,
        origin: str = API,
        percent: float | None = None,
    ) -> Alias:
        """Assign ``candidates`` by their weights to the name, which is created if it is new.

        With ``percent`` the only candidate gets that part of the requests, and the versions that the name
        serves keep the rest. A digest that the name already has keeps its number. ``tenants`` of ``None``
        keeps the tenants. If the deployment file declares the same content, or tenants, as the last time,
        these are not changed: a restart must not undo later changes by users. Raises
        :class:`policy.errors.AdapterRefused` (``name``), and :class:`policy.errors.TargetError` for invalid
        weights.
        """
        check_name(name)
        if not candidates or not all(DIGEST.fullmatch(each.digest) for each in candidates):
            raise ValueError(f"{candidates!r}: expected at least one, each with the sha256 of its content")
        with self._database.writing() as connection:
            before = _find(connection, model, name)
            at = self._clock()
            kept, split = _numbered(before.alias.versions if before else (), candidates, at)
            if percent is not None:
                split = _added(name, before.alias.split if before else (), split[0][0], percent)
            declaration = former = None
            if origin == DOCUMENT:
                content = tuple(sorted((each.digest, each.weight) for each in candidates))
                named = None if tenants is None else tuple(sorted(set(tenants)))
                declaration = _Declared(content=content, tenants=named)
            if before is not None and before.declared:
                former = _decode_declared(before.declared)
            if before is None:
                alias = Alias(model=model, name=name, revision=0, versions=kept, split=split, at=at)
                after = AdapterRow(alias, origin, "", ())
            elif declaration and former and declaration.content == former.content:
                after = before
            else:
                after = _standing_for(before, split, kept)
            if declaration:
                sources = {each.identity or each.source: each.digest for each in candidates}
                held = {version.digest for version in after.alias.versions}
                past = former.sources.items() if former else ()
                sources = {source: digest for source, digest in past if digest in held} | sources
                declaration = msgspec.structs.replace(declaration, sources=sources)
                after = after._replace(origin=origin, declared=msgspec.json.encode(declaration).decode())
            if tenants is not None and not (declaration and former and declaration.tenants == former.tenants):
                alias = msgspec.structs.replace(after.alias, tenants=tuple(sorted(set(tenants))))
                after = after._replace(alias=alias)
            return self._keep(connection, before, after)

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        """Split the name over its versions, by number; 0 leaves one out.

        Raises :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` for an unknown
        number or invalid weights.
        """
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            _check_versions(before, weights)
            return self._keep(connection, before, _standing_for(before, _weighed(weights)))

    def rollback(self, model: str, name: str, to: int | None = None) -> Alias:
        """Return the name to its previous split, or to version ``to`` alone; a second call goes further back.

        The previous split is the latest former one that gives the newest version of the present one less: a
        rollback of a version that was added, and then limited to a part of the requests, removes it. Raises
        :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` if there is none.
        """
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            if to is None:
                if (place := _way_back(before.alias.split, before.history)) is None:
                    raise TargetError(f"{name} has no former split to return to; it has {_versions(before)}")
                split, past = before.history[place], before.history[:place]
            else:
                _check_versions(before, (to,))
                split = ((to, 1.0),)
                # What served this version or a newer one is not gone back to.
                past = (*before.history, before.alias.split)
                past = tuple(each for each in past if all(number < to for number, _ in each))
            alias = msgspec.structs.replace(before.alias, split=split)
            return self._keep(connection, before, before._replace(alias=alias, history=past))

    def remove(self, model: str, name: str) -> None:
        """Remove the name and its versions; raises :class:`policy.errors.AdapterUnknown`."""
        with self._database.writing() as connection:
            before = _known(connection, model, name)
            erase(connection, model, name)
            next_revision(connection)
            retire(connection, (version.digest for version in before.alias.versions), self._clock())

    def unused_digests(self, stored: Collection[str], older_s: float) -> set[str]:
        """Those of ``stored`` that no version uses or used in the last ``older_s`` seconds."""
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
    """Raise :class:`policy.errors.AdapterRefused` (``name``) for an invalid adapter name."""
    if NAME.fullmatch(name) is None:
        raise AdapterRefused("name", f"{name!r:.100} is not a valid adapter name; expected {NAME.pattern}")


def _find(connection: Connection, model: str, name: str) -> AdapterRow | None:
    return next(iter(load(connection, model, name)), None)


def _digests(declared: str) -> frozenset[str]:
    return frozenset(digest for digest, _ in _decode_declared(declared).content) if declared else frozenset()


def _sources(row: AdapterRow) -> dict[str, str]:
    if not row.declared:
        return {}
    declared = _decode_declared(row.declared)
    if declared.sources:
        return declared.sources
    # What was hidden of these sources is not known: those that had such parts are fetched again. A newer
    # version of the same source, which a user added beside it, is not what the deployment file stands for.
    digests = _digests(row.declared)
    ordered = sorted(row.alias.versions, key=lambda version: version.digest in digests)
    return {version.source: version.digest for version in ordered}


def _known(connection: Connection, model: str, name: str) -> AdapterRow:
    found = _find(connection, model, name)
    if found is None:
        raise AdapterUnknown(f"there is no adapter {name!r:.100} on {model!r:.100}")
    return found


def _check_versions(row: AdapterRow, numbers: Iterable[int]) -> None:
    for number in numbers:
        if row.alias.version(number) is None:
            raise TargetError(f"{row.alias.name} has no version v{number}; it has {_versions(row)}")


def _versions(row: AdapterRow) -> str:
    return ", ".join(f"v{version.number}" for version in row.alias.versions)


def _numbered(
    kept: tuple[CatalogVersion, ...], candidates: Sequence[NewVersion], at: float
) -> tuple[tuple[CatalogVersion, ...], Split]:
    """The versions including new ``candidates``, and the weights of all candidates by number."""
    by_digest = {version.digest: version for version in kept}
    weights: dict[int, float] = {}
    for digest, facts, source, weight, _ in candidates:
        if digest not in by_digest:
            number = max((version.number for version in by_digest.values()), default=0) + 1
            by_digest[digest] = CatalogVersion(
                number=number, digest=digest, rank=facts.rank, size=facts.size, source=source, at=at
            )
        number = by_digest[digest].number
        weights[number] = weights.get(number, 0.0) + weight
    return tuple(sorted(by_digest.values(), key=lambda version: version.number)), _weighed(weights)


def _weighed(weights: Mapping[int, float]) -> Split:
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(
        weights.values()
    ):
        raise TargetError(f"the weights are {dict(weights)!r:.200}; expected numbers from 0, one above it")
    return tuple((number, float(weight)) for number, weight in sorted(weights.items()) if weight > 0)


def _added(name: str, split: Split, number: int, percent: float) -> Split:
    """``split`` with ``percent`` of the requests for one version, and the rest as before."""
    if not 0 <= percent <= 100:
        raise TargetError(f"the weight of a new version is {percent!r:.100}; expected 0 to 100 (per cent)")
    rest = {other: weight for other, weight in split if other != number}
    if not rest and percent < 100:
        raise TargetError(
            f"weight: got {percent:g}, expected 100: {name} has no other version to serve the rest"
        )
    if percent == 0 and len(rest) == len(split):
        return split
    whole = sum(rest.values())
    left = {other: (100 - percent) * weight / whole for other, weight in rest.items()}
    split = _weighed({**left, number: percent})
    return split if len(split) > 1 else ((split[0][0], 1.0),)


def _way_back(split: Split, past: Sequence[Split]) -> int | None:
    """The place in ``past`` of the split that a rollback returns to.

    It gives the newest version in use less than now, and none to a newer one, which was taken out before.
    """
    newest = max(number for number, _ in split)
    now = _share(split, newest)
    return next(
        (
            place
            for place in reversed(range(len(past)))
            if max(number for number, _ in past[place]) <= newest and _share(past[place], newest) < now
        ),
        None,
    )


def _share(split: Split, number: int) -> float:
    return dict(split).get(number, 0.0) / sum(weight for _, weight in split)


def _standing_for(
    before: AdapterRow, split: Split, kept: tuple[CatalogVersion, ...] | None = None
) -> AdapterRow:
    """``before`` with another split; the current one is added to its history."""
    found = before.alias.versions if kept is None else kept
    past = before.history
    if split != before.alias.split:
        past = (*past, before.alias.split)[-KEPT_HISTORY:]
    # Keep the versions of this split, of the one to return to and of the declaration, and the latest. Drop
    # history with others.
    place = _way_back(split, past)
    served = {number for number, _ in (*split, *(() if place is None else past[place]))}
    declared = _digests(before.declared)
    served |= {version.number for version in found if version.digest in declared}
    latest = [version.number for version in found if version.number not in served]
    stay = served | set(latest[max(0, len(found) - KEPT_VERSIONS) :])
    return before._replace(
        alias=msgspec.structs.replace(
            before.alias, split=split, versions=tuple(version for version in found if version.number in stay)
        ),
        history=tuple(each for each in past if all(number in stay for number, _ in each)),
    )
