"""Which of NVIDIA's XIDs accuse the card itself."""

from __future__ import annotations

# Errors of the program that ran, not of the card: it goes on with the next one. As NVIDIA's device plugin for
# Kubernetes has them.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


def is_of_card(xid: int) -> bool:
    """Whether an XID says that the card itself failed."""
    return xid > 0 and xid not in OF_PROGRAMS
