"""Plays a plan forward on an imaginary cluster: starts and drains take ticks, and some starts fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from policy.scaling.rollout import Footprint, Goal, Layer, LayerKey, step


@dataclass
class Played:
    """One imaginary replica and the ticks until its state changes."""

    state: str
    ticks: int


@dataclass
class Cluster:
    """Layers of one model; ``timeline`` holds the counts asked for, each time they changed.

    ``fail`` is the chance that a start fails once and is tried again in place.
    """

    goal: Goal
    footprints: Mapping[LayerKey, Footprint]
    gpus: int | None = None
    cpus: int | None = None
    random: Random = field(default_factory=lambda: Random(0))  # noqa: S311 - chance, not secrecy
    fail: float = 0.0
    wanted: dict[LayerKey, int] = field(default_factory=dict)
    replicas: dict[LayerKey, list[Played]] = field(default_factory=dict)
    timeline: list[dict[str, int]] = field(default_factory=list)

    def run(self, **counts: int) -> Cluster:
        """Let ``counts`` replicas of each shape, all of them ready, be what there is."""
        for key in self.footprints:
            count = counts.get(_name(key), 0)
            if count:
                self.wanted[key] = count
                self.replicas[key] = [Played("ready", 0) for _ in range(count)]
        return self

    def layers(self) -> dict[LayerKey, Layer]:
        """What a controller would observe."""
        return {
            key: Layer(
                wanted=wanted,
                starting=self._count(key, "starting"),
                ready=self._count(key, "ready"),
                draining=self._count(key, "draining"),
            )
            for key, wanted in self.wanted.items()
        }

    def tick(self) -> None:
        """One step of the plan, then one tick of every replica."""
        counts = step(self.goal, self.layers(), self.footprints, self.gpus, self.cpus)
        for key, count in counts.items():
            self._ask(key, count)
        said = {_name(key): count for key, count in self.wanted.items()}
        if not self.timeline or self.timeline[-1] != said:
            self.timeline.append(said)
        for key, replicas in self.replicas.items():
            for replica in replicas:
                self._age(replica)
            self.replicas[key] = [replica for replica in replicas if replica.state != "gone"]

    def ready(self) -> int:
        """Ready replicas of all layers."""
        return sum(self._count(key, "ready") for key in self.replicas)

    def used(self, resource: str) -> int:
        """What all replicas hold, draining ones included."""
        return sum(
            len(replicas) * getattr(self.footprints[key], resource) for key, replicas in self.replicas.items()
        )

    def reached(self) -> bool:
        """Whether the goal is all there is."""
        alone = all(not replicas for key, replicas in self.replicas.items() if key != self.goal.key)
        own = self.replicas.get(self.goal.key, [])
        return alone and len(own) == self._count(self.goal.key, "ready") == self.goal.count

    def _ask(self, key: LayerKey, count: int) -> None:
        replicas = self.replicas.setdefault(key, [])
        staying = [replica for replica in replicas if replica.state != "draining"]
        self.wanted[key] = count
        replicas += [Played("starting", self.random.randint(1, 4)) for _ in range(count - len(staying))]
        # Which ones leave is not the plan's to choose.
        for replica in self.random.sample(staying, max(0, len(staying) - count)):
            replica.state, replica.ticks = "draining", self.random.randint(1, 4)

    def _age(self, replica: Played) -> None:
        if replica.state == "ready":
            return
        replica.ticks -= 1
        if replica.ticks > 0:
            return
        if replica.state == "draining":
            replica.state = "gone"
        elif self.random.random() < self.fail:
            replica.ticks = self.random.randint(1, 4)
        else:
            replica.state = "ready"

    def _count(self, key: LayerKey, state: str) -> int:
        return sum(replica.state == state for replica in self.replicas.get(key, []))


def _name(key: LayerKey) -> str:
    return key.shape if key.generation == 1 else f"{key.shape}{key.generation}"
