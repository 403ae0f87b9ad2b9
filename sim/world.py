"""What a deployment does not say and a run has to assume: how long starts take, and what goes wrong."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from policy.section import Section

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Crash(Section, frozen=True):
    """The replica that serves for the longest crashes ``at`` so many seconds."""

    at: _Seconds
    model: str = ""


class Slow(Section, frozen=True):
    """The replica that serves for the longest takes ``factor`` times as long ``at`` .. ``until``.

    The factors of stretches that overlap on one replica multiply.
    """

    at: _Seconds
    until: _Seconds
    factor: Annotated[float, Meta(gt=0, le=1000)]
    model: str = ""


class World(Section, frozen=True):
    """Seconds from start to ready by path; ``None`` is the model's ``assumed_start_s`` (a wake: a tenth).

    The first start of a shape is a cold one, later ones find the weights cached. ``spread`` is the standard
    deviation of a start as a part of its mean. ``adapter_load_s`` holds up the steps of a replica.
    """

    cold_s: _Seconds | None = None
    cached_s: _Seconds | None = None
    sleeping_s: _Seconds | None = None
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    adapter_load_s: _Seconds = 0.05
    crashes: tuple[Crash, ...] = ()
    slow: tuple[Slow, ...] = ()


EARTH: World = msgspec.convert({}, World)
