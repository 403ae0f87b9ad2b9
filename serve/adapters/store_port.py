"""The port between the controller and its adapters: where they are fetched, admitted, recorded and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from policy.config.deployment import ModelSpec
from policy.wire.catalog import Alias
from store.progress import Report


class ImportedAdapter(NamedTuple):
    """An adapter that lies under its ``digest``: ``size`` in bytes, ``source`` as it is told and recorded."""

    digest: str
    rank: int
    size: int
    source: str


class AdapterStore(Protocol):
    """Every call blocks, and may be made from any thread; raises :class:`policy.errors.TidegateError`."""

    def aliases(self) -> tuple[Alias, ...]:
        """All names that were ever recorded and not removed."""
        ...

    def declared(self) -> set[tuple[str, str]]:
        """Model and name of those that a document brought."""
        ...

    def told(self, source: str) -> str:
        """``source`` as it may be told and recorded, without what may be a secret in it."""
        ...

    def take(self, spec: ModelSpec, source: str, report: Report) -> ImportedAdapter:
        """Fetch the adapter in ``source``, admit it for the model and put it in its place.

        Raises :class:`policy.errors.AdapterRefused`. The same source may be taken again at any time.
        """
        ...

    def holds(self, digest: str) -> bool:
        """Whether the files of this content are in their place."""
        ...

    def put(
        self,
        key: tuple[str, str],
        parts: Sequence[tuple[ImportedAdapter, float]],
        tenants: Collection[str] | None,
        *,
        declared: bool,
    ) -> Alias:
        """Let a name, by model and name, stand for ``parts`` by weight; durable when it returns.

        ``tenants`` of ``None`` leaves them as they are. A content that is among its versions keeps its
        number, and what was ``declared`` before is no change.
        """
        ...

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        """Let ``name`` stand for the versions with these numbers; durable when it returns.

        Raises :class:`policy.errors.AdapterUnknown`, and :class:`policy.errors.TargetError` for a version
        that it does not have.
        """
        ...

    def rollback(self, model: str, name: str) -> Alias:
        """Let ``name`` stand for what it stood for before; raises as :meth:`split` where that is nothing."""
        ...

    def remove(self, model: str, name: str) -> None:
        """Forget ``name``; raises :class:`policy.errors.AdapterUnknown`."""
        ...

    def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version as a tar, piece by piece; ``None`` where there is none."""
        ...

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        """Delete what no name had for ``older_s`` and is not in use; returns the digests of what went.

        ``in_use`` are serving names, which carry the beginning of a digest.
        """
        ...
