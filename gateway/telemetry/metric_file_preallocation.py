"""Room for the shared metric files, allocated before prometheus_client writes to them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

# Of the series of one model, by file: twice what a model without adapters and tenants was measured to take.
MODEL_BYTES = {
    "histogram": 256 * 1024,
    "counter": 16 * 1024,
    "gauge_livesum": 4 * 1024,
    "gauge_livemin": 4 * 1024,
    "gauge_livemax": 4 * 1024,
}
# A file doubles when it is full: what it has then is allocated, and as much again.
AHEAD = 4
_USED = struct.Struct("=i")


class MetricFiles:
    """The files of one process in ``directory``.

    prometheus_client makes files of holes and maps them. On a full disk a write to a hole ends the process
    (SIGBUS), and a file that once could not grow is never written correctly again.
    """

    def __init__(self, directory: Path, pid: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._files = {
            name: os.open(directory / f"{name}_{pid}.db", flags, mode=0o600) for name in MODEL_BYTES
        }

    def reserve(self, models: int) -> None:
        """Allocate what the next series of ``models`` models may need; raises :class:`OSError`.

        Called before the first series of the process and before each publication.
        """
        for name, file in self._files.items():
            head = os.pread(file, _USED.size, 0)
            used = _USED.unpack(head)[0] if head else 0
            wanted = 1 << max(AHEAD * used, MODEL_BYTES[name] * (1 + models)).bit_length()
            # prometheus_client cuts the file when it doubles what it has mapped.
            if os.fstat(file).st_size < wanted:
                os.posix_fallocate(file, 0, wanted)
