"""The adapter catalog as published to gateways; its version grows with each change."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from policy.wire.catalog import Alias, Catalog
from serve.state.resource_version import Revision

Key = tuple[str, str]


class CatalogPublisher:
    """The aliases by base model and name. Those of models that are not served are kept but not published."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self.revision = Revision()
        self._aliases: dict[Key, Alias] = {}
        self._line: tuple[int, bytes] = (0, b"")
        self.models: tuple[str, ...] = ()

    def serve(self, models: Iterable[str]) -> None:
        """Publish the aliases of these models."""
        self.models = tuple(models)
        self.revision.bump()

    def fill(self, aliases: Iterable[Alias]) -> None:
        """Replace all aliases."""
        self._aliases = {(alias.model, alias.name): alias for alias in aliases}
        self.revision.bump()

    def put(self, alias: Alias) -> None:
        """Set one alias; an equal one causes no new version."""
        key = (alias.model, alias.name)
        if self._aliases.get(key) != alias:
            self._aliases[key] = alias
            self.revision.bump()

    def drop(self, key: Key) -> None:
        """Remove one alias."""
        self._aliases.pop(key, None)
        self.revision.bump()

    def get(self, key: Key) -> Alias | None:
        """The alias of one name, whether its model is served or not."""
        return self._aliases.get(key)

    def of(self, model: str) -> list[Alias]:
        """The aliases of a model; none if it is not served."""
        return [alias for alias in self._aliases.values() if alias.model == model and model in self.models]

    def line(self) -> tuple[int, bytes]:
        """The version of the catalog, and the catalog as a JSON line."""
        if self._line[0] != self.revision.number:
            aliases = tuple(alias for alias in self._aliases.values() if alias.model in self.models)
            catalog = Catalog(epoch=self._epoch, version=self.revision.number, aliases=aliases)
            self._line = (self.revision.number, msgspec.json.encode(catalog) + b"\n")
        return self._line
