"""The adapter store port of the controller: import, records and files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from policy.config.deployment import ModelSpec
from policy.wire.catalog import Alias
from store.progress import Report


class ImportedAdapter(NamedTuple):
    """An adapter that is stored under its ``digest``: ``size`` in bytes, ``source`` without secrets."""

    digest: str
    rank: int
    size: int
    source: str


class AdapterStore(Protocol):
    """Every call blocks, may come from any thread, and may raise :class:`policy.errors.TidegateError`."""

    def aliases(self) -> tuple[Alias, ...]:
        """The aliases of all names."""
        ...

    def declared(self) -> set[tuple[str, str]]:
        """Model and name of the aliases that the deployment file declared."""
        ...

    def redacted(self, source: str) -> str:
        """``source`` without parts that may be secret, for messages and records."""
        ...

    def take(self, spec: ModelSpec, source: str, report: Report) -> ImportedAdapter:
        """Fetch the adapter at ``source``, validate it for the model and store it.

        Raises :class:`policy.errors.AdapterRefused`. The same source may be imported again at any time.
        """
        ...

    def holds(self, digest: str) -> bool:
        """Whether the files of this digest are stored."""
        ...

    def put(
        self,
        key: tuple[str, str],
        parts: Sequence[tuple[ImportedAdapter, float]],
        tenants: Collection[str] | None,
        *,
        declared: bool,
    ) -> Alias:
        """Set the versions of a name (``key``: model, name) and their weights; durable when it returns.

        ``tenants`` of ``None`` keeps those of the name. A digest that is among its versions keeps its number.
        The same declaration again (``declared``) changes nothing.
        """
        ...

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        """Split ``name`` over the versions with these numbers; durable when it returns.

        Raises :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` for an unknown
        version.
        """
        ...

    def rollback(self, model: str, name: str) -> Alias:
        """Return ``name`` to its former split; raises as :meth:`split` if there is none."""
        ...

    def remove(self, model: str, name: str) -> None:
        """Remove ``name``; raises :class:`policy.errors.AdapterUnknown`."""
        ...

    def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version as a tar, in blocks; ``None`` if there are none."""
        ...

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        """Delete files that no name used for ``older_s`` seconds and that are not in use; their digests.

        ``in_use`` are serving names, which contain the beginning of a digest.
        """
        ...
