"""The section ``control`` of a model: what it is promised, and who decides how many replicas, within what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from policy.config.section import Count, Fraction, Seconds, Section

# The name of a policy, or a mapping with that one key and its parameters.
Choice = str | dict[str, Any]


class SloConfig(Section, frozen=True):
    """The service level that requests of a model are promised, in seconds at the 95th percentile.

    ``ttft_p95_s`` bounds how long a replica may have a request wait, beyond which the gateway keeps it, and
    how long that may be predicted to last before a request of a common class is refused.
    ``itl_p95_s`` bounds how many a replica runs at once, until one has waited as long as its answer would
    take at it. ``None`` promises nothing. ``attainment`` is the fraction of requests that shall be within
    both.
    """

    ttft_p95_s: Seconds | None = None
    itl_p95_s: Seconds | None = None
    attainment: Fraction = 0.99


class ScaleConfig(Section, frozen=True):
    """How fast a count may change, and what must stay.

    A decision adds at most ``max_step_up`` times the count that there is (one at least), and takes at most
    ``max_step_down`` of it. A replica is given up after it was not needed for ``hold_s``, of which ``auto``
    is the longer of a minute and the time that a replica needs to start. ``min_healthy`` replicas stay ready
    while anything changes. After ``zero_after_s`` without a request a model whose mode allows it has none;
    while one is likelier than ``standby`` within the time of a start, one is kept.
    """

    max_step_up: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_step_down: Annotated[float, Meta(gt=0, le=1)] = 0.5
    hold_s: Seconds | Literal["auto"] = "auto"
    min_healthy: Count = 1
    zero_after_s: Seconds | None = None
    standby: Fraction = 0.5


class ModeSwitchConfig(Section, frozen=True):
    """When the mode is switched, and how a replica leaves.

    A switch must promise to cost ``gain`` less for ``confirm_s`` on end, and the last one be ``dwell_s``
    ago. In-flight requests of a replica that leaves, or falls asleep, get ``drain_timeout_s`` to finish.
    With ``sleep`` at ``auto`` the engines of modes that share their GPUs sleep there in turns.
    """

    gain: Annotated[float, Meta(gt=0, lt=1)] = 0.15
    confirm_s: Seconds = 60.0
    dwell_s: Seconds = 300.0
    drain_timeout_s: Seconds = 120.0
    sleep: Literal["auto", "never"] = "auto"


class GuardConfig(Section, frozen=True):
    """What keeps a decision from harm: figures older than ``stale_s`` take nothing away.

    With ``dry_run`` decisions are made, logged and explained, and not carried out.
    """

    # Gateways and replicas tell how they are once a second, and may miss it: so below that nothing is fresh.
    stale_s: Annotated[float, Meta(ge=3, le=86_400)] = 15.0
    dry_run: bool = False


class ControlConfig(Section, frozen=True):
    """What bounds a change of count or mode, and what is promised meanwhile.

    A decision is made every ``tick_s`` by ``policy``; ``shadow`` decides beside it, and is only compared.
    ``assumed_start_s`` stands in for the measured start-to-ready time of a shape that never ran.
    """

    tick_s: Annotated[float, Meta(ge=0.2, le=300)] = 5.0
    slo: SloConfig = SloConfig()
    policy: Choice = "predictive"
    shadow: Choice | None = None
    scale: ScaleConfig = ScaleConfig()
    mode: ModeSwitchConfig = ModeSwitchConfig()
    guard: GuardConfig = GuardConfig()
    start_timeout_s: Seconds = 600.0
    assumed_start_s: Seconds = 60.0
    progress_timeout_s: Seconds = 60.0
