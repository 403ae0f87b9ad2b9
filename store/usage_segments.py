"""The files in which gateway workers record the usage of requests, until the ledger has it.

A segment is a header of :data:`HEADER_WORDS` words (a magic number, the number of slots), slots of
:data:`policy.tenancy.usage_record.WORDS`, and the dimensions that slots name, a JSON line each, followed by
zeros. Header and slots are mapped.
"""

from __future__ import annotations

from typing import Final

SEGMENT_SUFFIX = ".usage"
HEADER_WORDS: Final = 8
# Slots of a segment, 512 KiB, and the room for dimensions that is allocated at a time.
SLOTS: Final = 8191
DIMS_BYTES: Final = 64 * 1024
# Another version must not be read as this one.
MAGIC: Final = 0x7469646575736501
