"""Write a gateway's capture as a trace, sorted by arrival time."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from policy.errors import TidegateError

# Lines sorted in memory at once: about 100 MB with long prompts.
MAX_LINES = 100_000


class CaptureRefused(TidegateError):
    """The endpoint is not the admin port of a gateway that can be captured."""


class _Line(msgspec.Struct):
    at: float = 0.0
    lost: int = 0
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
        elif row.lost:
            self.lost = row.lost
            return
        else:
            self.requests += 1
        self._part.write(line + b"\n")


def in_order(part: Path, target: Path, *, most: int | None = None) -> None:
    """Write ``part``, a header and lines in any order, to ``target``, sorted by time.

    At most ``most`` lines are in memory: a longer file is sorted in runs beside ``target``.
    """
    most = MAX_LINES if most is None else most
    with ExitStack() as files:
        lines = files.enter_context(part.open("rb"))
        header = lines.readline()
        run = _sorted(lines, most)
        runs: list[Iterator[tuple[float, bytes]]] = []
        while len(run) == most:
            file = files.enter_context(tempfile.TemporaryFile(dir=target.absolute().parent))
            file.writelines(line for _, line in run)
            file.seek(0)
            runs.append(_instants(file))
            run = _sorted(lines, most)
        written = files.enter_context(target.open("wb"))
        written.write(header)
        written.writelines(line for _, line in heapq.merge(*runs, run, key=_instant))


def _sorted(lines: IO[bytes], most: int) -> list[tuple[float, bytes]]:
    return sorted(islice(_instants(lines), most), key=_instant)


def _instants(lines: IO[bytes]) -> Iterator[tuple[float, bytes]]:
    """Each complete line with its instant; a killed process may leave a partial last line."""
    return ((_decode(line).at, line) for line in lines if line.endswith(b"\n"))


def _instant(entry: tuple[float, bytes]) -> float:
    return entry[0]
