"""What names stand for, as it is told to gateways: a catalog with a version that grows with each change."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from policy.wire.catalog import Alias, Catalog
from serve.state.revision import Revision

Key = tuple[str, str]


class CatalogPublisher:
    """The aliases by base model and name; those of models that are not served are kept, and not told."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self.revision = Revision()
        self._aliases: dict[Key, Alias] = {}
        self._line: tuple[int, bytes] = (0, b"")
        self.models: tuple[str, ...] = ()

    def serve(self, models: Iterable[str]) -> None:
        """Tell of these models from now on."""
        self.models = tuple(models)
        self.revision.bump()

    def fill(self, aliases: Iterable[Alias]) -> None:
        """These are all that there are."""
        self._aliases = {(alias.model, alias.name): alias for alias in aliases}
        self.revision.bump()

    def put(self, alias: Alias) -> None:
        """A name stands for something now; what is no change is no new version."""
        key = (alias.model, alias.name)
        if self._aliases.get(key) != alias:
            self._aliases[key] = alias
            self.revision.bump()

    def drop(self, key: Key) -> None:
        """A name is gone."""
        self._aliases.pop(key, None)
        self.revision.bump()

    def get(self, key: Key) -> Alias | None:
        """What one name stands for, served or not."""
        return self._aliases.get(key)

    def of(self, model: str) -> list[Alias]:
        """What the names on a model stand for, nothing where it is not served."""
        return [alias for alias in self._aliases.values() if alias.model == model and model in self.models]

    def line(self) -> tuple[int, bytes]:
        """The version of the catalog, and the catalog as a line of JSON."""
        if self._line[0] != self.revision.number:
            aliases = tuple(alias for alias in self._aliases.values() if alias.model in self.models)
            catalog = Catalog(epoch=self._epoch, version=self.revision.number, aliases=aliases)
            self._line = (self.revision.number, msgspec.json.encode(catalog) + b"\n")
        return self._line
