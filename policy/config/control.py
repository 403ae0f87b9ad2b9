"""The base types of the deployment file, a model's section ``control``, and the election of controllers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from policy.config.cron import is_between
from policy.types import Priority

Count = Annotated[int, Meta(ge=0, le=4096)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


# The name of a policy, or a mapping with that one key and its parameters.
Choice = str | dict[str, Any]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A YAML mapping; unknown keys are refused."""


class SloConfig(Section, frozen=True):
    """The SLO of a model: latency targets in seconds at the 95th percentile; ``None`` for no target.

    ``ttft_p95_s`` (time to first token): a request that would start later than half of it on a replica waits
    in the gateway; one of priority standard or sheddable that is predicted to wait longer than that there is
    rejected. ``itl_p95_s`` (inter-token latency) limits the concurrent requests of a replica, except for a
    request that has waited as long as its answer would take. ``attainment`` is the fraction of requests that
    must meet both.
    """

    ttft_p95_s: Seconds | None = None
    itl_p95_s: Seconds | None = None
    attainment: Fraction = 0.99


class ScalingSchedule(Section, frozen=True):
    """At least ``min`` and at most ``max`` replicas from each time of ``start`` to the next of ``end``.

    Both are cron expressions on the wall clock of ``timezone``. Of schedules in force at once the highest
    ``min`` and the lowest ``max`` apply; ``min`` goes before ``max``.
    """

    start: str
    end: str
    timezone: str = "UTC"
    min: Count | None = None
    max: Positive | None = None

    def in_force(self, wall_s: float) -> bool:
        """Whether it applies at ``wall_s``: seconds since 1970-01-01 00:00 on the clock of its time zone."""
        return is_between(self.start, self.end, wall_s)


class ScalingRateLimit(Section, frozen=True):
    """The most changes in any ``period_s``: ``replicas``, or a ``fraction`` of those at its start."""

    period_s: Annotated[float, Meta(gt=0, le=3600)]
    replicas: Count | None = None
    fraction: Annotated[float, Meta(gt=0, le=100)] | None = None


class ScaleConfig(Section, frozen=True):
    """Limits of scaling.

    A decision adds at most ``max_step_up`` times the current replica count (min. 1) and removes at most the
    fraction ``max_step_down`` of it. A replica is removed after it was not needed for ``hold_s``; ``auto`` is
    the longer of a minute and the start-up time; one is added after it was needed for ``hold_up_s``. Of the
    ``rates_up`` and ``rates_down`` the one that allows the most applies. ``spare`` replicas are kept beyond
    the need, and ``schedules`` bound the count by time of day. ``min_healthy`` replicas stay ready during
    changes. A model whose mode allows zero replicas has none after ``zero_after_s`` without a request, unless
    a request within the start-up time is more probable than ``standby``.
    """

    max_step_up: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_step_down: Annotated[float, Meta(gt=0, le=1)] = 0.5
    hold_s: Seconds | Literal["auto"] = "auto"
    hold_up_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    rates_up: tuple[ScalingRateLimit, ...] = ()
    rates_down: tuple[ScalingRateLimit, ...] = ()
    spare: Count = 0
    schedules: tuple[ScalingSchedule, ...] = ()
    min_healthy: Count = 1
    zero_after_s: Seconds | None = None
    standby: Fraction = 0.5


class ModeSwitchConfig(Section, frozen=True):
    """When the mode is switched, and how replicas drain.

    A switch needs a predicted saving of ``gain`` for ``confirm_s`` without interruption, at least ``dwell_s``
    after the last switch. In-flight requests of a replica that terminates or goes to sleep have
    ``drain_timeout_s`` to finish. With ``sleep`` at ``auto``, modes that share GPUs use vLLM's sleep mode.
    """

    gain: Annotated[float, Meta(gt=0, lt=1)] = 0.15
    confirm_s: Seconds = 60.0
    dwell_s: Seconds = 300.0
    drain_timeout_s: Seconds = 120.0
    sleep: Literal["auto", "never"] = "auto"


class GuardConfig(Section, frozen=True):
    """Safety limits: with metrics older than ``stale_s`` nothing is scaled down.

    With ``dry_run`` decisions are made, logged and explained, but not carried out.
    """

    # Gateways and replicas report once a second and may miss one; a lower limit would make all metrics stale.
    stale_s: Annotated[float, Meta(ge=3, le=86_400)] = 15.0
    dry_run: bool = False


class ControlConfig(Section, frozen=True):
    """Scaling of one model: SLO, policy and limits.

    ``slo_by_priority`` replaces ``slo`` for requests of these priorities. ``policy`` decides every
    ``tick_s``; ``shadow`` is evaluated for comparison only. ``assumed_start_s`` is used as start-up time of a
    shape that never ran.
    """

    tick_s: Annotated[float, Meta(ge=0.2, le=300)] = 5.0
    slo: SloConfig = SloConfig()
    slo_by_priority: dict[str, SloConfig] = {}
    policy: Choice = "predictive"
    shadow: Choice | None = None
    scale: ScaleConfig = ScaleConfig()
    mode: ModeSwitchConfig = ModeSwitchConfig()
    guard: GuardConfig = GuardConfig()
    start_timeout_s: Seconds = 600.0
    assumed_start_s: Seconds = 60.0
    progress_timeout_s: Seconds = 60.0

    def slo_of(self, priority: Priority) -> SloConfig:
        """The SLO of the requests of one priority."""
        return self.slo_by_priority.get(priority, self.slo)

    @property
    def strictest_slo(self) -> SloConfig:
        """The strictest targets of any priority: replicas run requests of all of them side by side."""
        if not self.slo_by_priority:
            return self.slo
        slos = [self.slo_of(priority) for priority in Priority]
        return SloConfig(
            ttft_p95_s=min((each.ttft_p95_s for each in slos if each.ttft_p95_s is not None), default=None),
            itl_p95_s=min((each.itl_p95_s for each in slos if each.itl_p95_s is not None), default=None),
            attainment=max(each.attainment for each in slos),
        )


class KubernetesLease(Section, frozen=True):
    """A Lease of Kubernetes (coordination.k8s.io/v1), by default in the namespace of the pod.

    ``api`` is the URL of the API server, by default that of the pod's cluster, with its service account.
    """

    name: str = "tidegate-controller"
    namespace: str = ""
    api: str = ""


class LeaderElection(Section, frozen=True):
    """How controllers elect their leader: by a lease of ``lease_s`` seconds that it renews.

    The lease is a row of the database (``store``), or that of ``kubernetes``.
    """

    lease_s: Annotated[float, Meta(ge=1, le=300)] = 10.0
    kubernetes: KubernetesLease | None = None
