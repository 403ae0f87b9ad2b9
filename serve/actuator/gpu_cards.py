"""The GPUs of this machine, and which of them a host without Ray gets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec

from policy.config.deployment import Cluster
from policy.scaling.budget_resources import ROUNDING
from serve.nvml import NvmlMissing, load_nvml

# An index or a UUID.
_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


class GpuGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of one host by index or UUID, and the part of each that it has."""

    cards: tuple[str, ...] = ()
    share: float = 1.0


def cards_of_machine(cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that hosts may use: simulated ones, those of ``CUDA_VISIBLE_DEVICES``, or all of NVML."""
    if cluster.simulated_gpus is not None:
        return tuple(str(index) for index in range(cluster.simulated_gpus))
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        # As CUDA reads it: an invalid name, such as -1, hides itself and all that follow.
        return tuple(takewhile(_GPU.fullmatch, map(str.strip, visible.split(","))))
    with contextlib.suppress(NvmlMissing):
        nvml = load_nvml()
        with contextlib.suppress(nvml.NVMLError):
            return tuple(str(index) for index in range(int(nvml.nvmlDeviceGetCount())))
    return ()


def choose(gpus: float, cards: Sequence[str], held: Iterable[GpuGrant]) -> GpuGrant | None:
    """GPUs for a host that needs ``gpus`` of the ``cards``, of which others have ``held``; ``None`` to wait.

    A fraction goes to the fullest GPU with room, so that others stay whole. Several GPUs are neighbours at a
    multiple of their number, if such are free: pairs and quads of a machine are often linked.
    """
    used = dict.fromkeys(cards, 0.0)
    for grant in held:
        for card in grant.cards:
            used[card] = used.get(card, 0.0) + grant.share
    if gpus < 1:
        room = [card for card in cards if used[card] + gpus <= 1 + ROUNDING]
        return GpuGrant(cards=(max(room, key=lambda card: used[card]),), share=gpus) if room else None
    count = int(gpus)
    blocks = (cards[at : at + count] for at in range(0, len(cards) - count + 1, count))
    free = [card for card in cards if not used[card]]
    aligned = (block for block in blocks if not any(used[card] for card in block))
    chosen = tuple(next(aligned, free[:count]))
    return GpuGrant(cards=chosen) if len(chosen) == count else None
