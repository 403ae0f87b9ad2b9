"""Write a gateway's capture as a trace, sorted by arrival time."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from policy.errors import TidegateError


class CaptureRefused(TidegateError):
    """The endpoint is not the admin port of a gateway that can be captured."""


class _Line(msgspec.Struct):
    at: float = 0.0
    lost: int | None = None
    tidegate: str = ""


_decode = msgspec.json.Decoder(_Line).decode


class CaptureFile:
    """Writes a capture to the file ``part``, in the order in which requests end.

    ``requests`` and ``lost`` are counts; ``on_change`` is called after each read.
    """

    def __init__(self, part: IO[bytes], on_change: Callable[[], None]) -> None:
        self.header = b""
        self.requests = self.lost = 0
        self._part = part
        self._on_change = on_change
        self._rest = b""

    def sent(self, at: float) -> None: ...

    def feed(self, data: bytes, at: float) -> None:
        """Add the bytes of one read."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        self._part.flush()  # so that it outlives this process
        self._on_change()

    def _take(self, line: bytes) -> None:
        try:
            row = _decode(line)
        except msgspec.MsgspecError:
            raise CaptureRefused(f"no line of a capture: {line[:200].decode(errors='replace')}") from None
        if not self.header:
            if row.tidegate != "capture":
                raise CaptureRefused(f"no capture: it begins with {line[:200].decode(errors='replace')}")
            self.header = line
        elif row.lost is not None:
            self.lost = row.lost
            return
        else:
            self.requests += 1
        self._part.write(line + b"\n")


def in_order(part: Path, target: Path) -> None:
    """Write ``part``, a header and lines in any order, to ``target``, sorted by time.

    Only the instants and the positions of the lines are in memory, 16 bytes per line.
    """
    instants, positions = array("d"), array("q")
    with part.open("rb") as lines, target.open("wb") as written:
        written.write(lines.readline())
        position = lines.tell()
        for line in lines:
            if line.endswith(b"\n"):  # a killed process may leave a partial last line
                instants.append(_decode(line).at)
                positions.append(position)
            position += len(line)
        for index in np.argsort(instants, kind="stable"):
            lines.seek(positions[index])
            written.write(lines.readline())
