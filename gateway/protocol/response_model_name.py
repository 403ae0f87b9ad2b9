"""Give an answer our name of the model, where the server that answers calls it by another one.

The member ``"model": "THEIRS"`` is searched as bytes, at any depth: chat chunks have it at the top, events of
other APIs inside. A text that quotes it is not hit, since a quote within a JSON string is escaped.
"""

from __future__ import annotations

import msgspec


class ModelNameRewrite:
    """The rewriting of one answer from ``theirs`` to ``ours``."""

    def __init__(self, theirs: str, ours: str) -> None:
        old, new = msgspec.json.encode(theirs), msgspec.json.encode(ours)
        # Compact, and with a space, as encoders write it.
        self._pairs = [(member + old, member + new) for member in (b'"model":', b'"model": ')]
        self._most = len(self._pairs[-1][0])
        self._held = b""

    def whole(self, data: bytes) -> bytes:
        """``data``, which ends at the end of an event or an answer, with our name."""
        for old, new in self._pairs:
            data = data.replace(old, new)
        return data

    def feed(self, data: bytes, *, complete: bool) -> bytes:
        """A part of an answer; what could be the begin of their name is held until the next part."""
        data = self.whole(self._held + data)
        if complete:
            self._held = b""
            return data
        cut = max(0, len(data) - self._most + 1)
        self._held = data[cut:]
        return data[:cut]
