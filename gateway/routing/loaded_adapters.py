"""The adapters that one replica has loaded, and those that it could not load lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

# An adapter that failed to load is not requested again within this time.
FAILED_S: Final = 2.0


class ReplicaAdapters:
    """The adapters of one replica, which lists those ``loaded``.

    If it ``loads`` on demand, it serves all but those ``refused``, which it could not load lately; else only
    those listed.
    """

    def __init__(self, loaded: Sequence[str], *, loads: bool, clock: Callable[[], float] = monotonic) -> None:
        self.loads = loads
        self._clock = clock
        self.loaded = frozenset(loaded)
        self.refused: frozenset[str] = frozenset()
        self._listed: Sequence[str] = ()
        self._refused: Sequence[str] = ()
        # Until when each is not requested, the oldest failure first.
        self._failed: OrderedDict[str, float] = OrderedDict()

    def serves(self, adapter: str) -> bool:
        """Whether requests for ``adapter``, or without one (""), can be served there."""
        if not adapter:
            return True
        if not self.loads:
            return adapter in self.loaded
        if adapter in self.refused:
            return False
        return not self._failed or self._failed.get(adapter, 0.0) <= self._clock()

    @property
    def serves_all(self) -> bool:
        return self.loads and not self.refused and not self._failed

    def drop_served(self, adapters: set[str]) -> None:
        """Take those that it :meth:`serves` out of ``adapters``."""
        if self.loads:
            adapters &= self.refusing
        else:
            adapters -= self.loaded
            adapters.discard("")

    @property
    def refusing(self) -> frozenset[str]:
        """Adapters that it could not load lately, by its own list and by refused requests."""
        if not self._failed:
            return self.refused
        now = self._clock()
        return self.refused | {name for name, until in self._failed.items() if until > now}

    def update(self, loaded: Sequence[str], refused: Sequence[str]) -> bool:
        """Take the replica's lists of loaded and failed adapters; returns whether they changed."""
        if loaded == self._listed and refused == self._refused:
            return False
        self._listed, self._refused = loaded, refused
        self.loaded, self.refused = frozenset(loaded), frozenset(refused)
        return True

    def failed(self, adapter: str) -> None:
        """It could not load ``adapter`` just now; its next list may be older than this."""
        now = self._clock()
        while self._failed and next(iter(self._failed.values())) <= now:
            self._failed.popitem(last=False)
        self._failed[adapter] = now + FAILED_S
        self._failed.move_to_end(adapter)

    def forget(self) -> None:
        """Its process was replaced: only what it lists from now on is loaded."""
        self.loaded = self.refused = frozenset()
        self._listed = self._refused = ()
        self._failed.clear()
