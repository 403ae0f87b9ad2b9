"""The adapters that requests may name: an index, rebuilt when the catalog or the deployment changes.

A request keeps the version that its name stood for when it arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import xxhash

from gateway.intake.principal import Principal
from policy.config.deployment import Deployment
from policy.hashing import hash_name
from policy.types import EngineKind
from policy.wire.adapter_catalog import Alias, CatalogSnapshot, CatalogVersion, served_name
from policy.wire.headers import ADAPTER_HEADER

View = tuple[frozenset[tuple[str, ...]], frozenset[str] | None, tuple[frozenset[str], ...]]

EMPTY = CatalogSnapshot(epoch=0.0, version=0)


class SelectedAdapter:
    """A version of an adapter: ``served``: its name in engines and answers; ``header``: for a replica."""

    def __init__(self, alias: Alias, version: CatalogVersion) -> None:
        self.model = alias.model
        self.name = alias.name
        self.digest = version.digest
        self.served = served_name(alias.name, version.digest)
        self.header = f"{ADAPTER_HEADER}: {alias.name}@{version.digest}\r\n".encode()


class AliasEntry:
    """An alias, as requests find it; ``main`` is the version with the largest weight.

    ``cards`` are kept for :mod:`gateway.api.models_response`: by name, each with the ``max_model_len`` in it.
    """

    def __init__(self, alias: Alias, given: dict[CatalogVersion, float]) -> None:
        self.alias = alias
        self.main = max(given, key=lambda version: given[version])
        self.cards: dict[str, tuple[int | None, bytes]] = {}
        self._tenants = frozenset(alias.tenants)
        self._versions: dict[str, SelectedAdapter] = {}
        self._only = self._of(self.main) if len(given) == 1 else None

    def shows(self, principal: Principal) -> bool:
        """Whether ``principal`` may see the adapter; an admin sees all that its limits allow."""
        account, alias = principal.account, self.alias
        listed = not self._tenants or account.name in self._tenants or account.admin
        return listed and principal.may_use(alias.model, alias.name)

    def pick(self, principal: Principal, session: bytes | None, draw: Callable[[], int]) -> SelectedAdapter:
        """The version for this client: stable per session, else per tenant, else drawn by ``draw``."""
        if self._only is not None:
            return self._only
        name = principal.account.name
        key = xxhash.xxh3_64_intdigest(session) if session else hash_name(name) if name else draw()
        return self._of(self.alias.pick(key))

    def pinned(self, digest: str) -> SelectedAdapter | None:
        """The version whose digest begins with ``digest``, if exactly one does."""
        version = self.alias.pinned(digest)
        if version is None:
            return None
        meant = {other.digest for other in self.alias.versions if other.digest.startswith(digest)}
        return self._of(version) if len(meant) == 1 else None

    def _of(self, version: CatalogVersion) -> SelectedAdapter:
        found = self._versions.get(version.digest)
        if found is None:
            found = self._versions[version.digest] = SelectedAdapter(self.alias, version)
        return found


class CatalogView:
    """The catalog by the names that requests use: ``NAME``, ``BASE:NAME``, and either with ``@DIGEST``.

    A ``NAME`` on several models is that of the first in the deployment's order that the client may see.
    ``draw`` gives 64 random bits. ``known``: a catalog was received; ``wanted``: the deployment has models
    that take adapters. ``changed`` counts changes of the index; ``on_names`` gets the models and names of
    each catalog.
    """

    def __init__(
        self,
        draw: Callable[[], int],
        on_names: Callable[[Collection[tuple[str, str]]], None] = lambda names: None,
    ) -> None:
        self._draw = draw
        self._on_names = on_names
        self._places: dict[str, int] = {}
        self._foreign: frozenset[str] = frozenset()
        self._entries: dict[tuple[str, str], AliasEntry] = {}
        self._names: dict[str, list[AliasEntry]] = {}
        self._order: list[AliasEntry] = []
        self._lists: list[tuple[str, ...]] = []
        self.catalog = EMPTY
        self.known = False
        self.wanted = False
        self.changed = 0

    def read(self, deployment: Deployment) -> None:
        """Take the order of the deployment's models; external servers load no adapters of ours."""
        models = deployment.models
        self._places = {spec.name: place for place, spec in enumerate(models)}
        self._foreign = frozenset(spec.name for spec in models if spec.engine is EngineKind.EXTERNAL)
        self.wanted = any(spec.adapters is not None for spec in models)
        self._index()

    def take(self, catalog: CatalogSnapshot) -> None:
        """Replace the catalog; aliases that did not change keep their entry."""
        if catalog is self.catalog:
            return
        former = self._entries
        entries: dict[tuple[str, str], AliasEntry] = {}
        for alias in catalog.aliases:
            key = (alias.model, alias.name)
            entry = former.get(key)
            if entry is not None and (entry.alias is alias or entry.alias == alias):
                entries[key] = entry
            elif given := _weights(alias):
                entries[key] = AliasEntry(alias, given)
        self._entries = entries
        self.catalog = catalog
        self.known = True
        self._on_names(entries.keys())
        self._index()

    def resolve(self, name: str, principal: Principal, session: bytes | None) -> SelectedAdapter | None:
        """The adapter version for ``name`` and this client; ``None`` also if the client may not see it."""
        found = self.find(name, principal)
        if found is None:
            return None
        entry, pinned = found
        return entry.pick(principal, session, self._draw) if pinned is None else pinned

    def find(self, name: str, principal: Principal) -> tuple[AliasEntry, SelectedAdapter | None] | None:
        """The entry of ``name``, and the version if it pins one; ``None`` if ``principal`` sees none."""
        entries = self._names.get(name)
        if entries is not None:
            for entry in entries:
                if entry.shows(principal):
                    return entry, None
            return None
        bare, pin, digest = name.rpartition("@")
        entries = self._names.get(bare) if pin else None
        if entries is not None:
            for entry in entries:
                if entry.shows(principal) and (pinned := entry.pinned(digest)) is not None:
                    return entry, pinned
        return None

    def visible(self, principal: Principal) -> list[AliasEntry]:
        """The adapters that ``principal`` may see, in the order of the deployment's models."""
        return [entry for entry in self._order if entry.shows(principal)]

    def views(self, principal: Principal) -> View:
        """The tenant lists that ``principal`` is on, and its limits: with the same, one sees the same."""
        account = principal.account
        lists = [names for names in self._lists if account.admin or account.name in names]
        return frozenset(lists), principal.models, principal.adapters

    def _index(self) -> None:
        last = len(self._places)
        order = [entry for entry in self._entries.values() if entry.alias.model not in self._foreign]
        order.sort(key=lambda entry: self._places.get(entry.alias.model, last))
        names: dict[str, list[AliasEntry]] = {}
        for entry in order:
            alias = entry.alias
            names.setdefault(alias.name, []).append(entry)
            names[f"{alias.model}:{alias.name}"] = [entry]
        self._order, self._names = order, names
        self._lists = list({entry.alias.tenants for entry in order if entry.alias.tenants})
        self.changed += 1


def _weights(alias: Alias) -> dict[CatalogVersion, float]:
    """The versions of ``alias`` that receive requests, with their weights."""
    kept = [(alias.version(number), weight) for number, weight in alias.split if weight > 0]
    return {version: weight for version, weight in kept if version is not None}
