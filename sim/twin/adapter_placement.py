"""The controller's placement of one model's adapters in virtual time: beats in, a plan, orders out.

The plan is production's own. It goes by what replicas were asked for: not by a rise that has only begun, nor
by who waits for a slot, which :mod:`serve.adapters.placement` sees too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policy.placement.plan import EMPTY, Demand, Host, Plan, plan
from sim.twin.adapter_slots import Counts, GuardRule

# COALESCE_S of serve/engine/guard.py, BEAT_S of serve/host/heartbeat.py, PLAN_S of
# serve/adapters/placement.py: how late a gateway hears what is loaded, how often a replica tells what it was
# asked for and is told what to hold, and how often that is planned anew.
LINE_S = 0.02
BEAT_S = 0.5
PLAN_S = 5.0


class TwinPlacement:
    """The last plan, and what it is made from; a load takes ``load_s`` seconds.

    ``key`` gives an adapter's 64-bit hash. Instants are seconds of the run.
    """

    def __init__(self, load_s: float, key: Callable[[str], int]) -> None:
        self.plan: Plan = EMPTY
        self._load_s = load_s
        self._key = key
        self._counts = Counts()
        # Requests in flight as seen by beats since the last plan: their sum, and how many beats.
        self._seen = self._beats = 0

    def beat(self, replica: str, rule: GuardRule, in_flight: int, at: float) -> None:
        """A replica says what it was asked for and how many are there, and is answered what to hold."""
        for adapter, count in rule.news.items():
            self._counts.add(adapter, at, count)
        rule.news.clear()
        self._seen += in_flight
        self._beats += 1
        rule.hold(self.plan.hold.get(replica, ()))

    def replan(self, hosts: Iterable[Host], at: float) -> None:
        """Plan for the replicas that are there."""
        listed = list(hosts)
        rates = {adapter: self._counts.rate(adapter, at) for adapter in self._counts}
        # Little's law: who is there, over who comes.
        in_flight = self._seen * len(listed) / self._beats if self._beats else 0.0
        service_s = in_flight / sum(rates.values()) if rates else 0.0
        self._seen = self._beats = 0
        demands = [
            Demand(name=name, key=self._key(name), rate=rate, load_s=self._load_s, service_s=service_s)
            for name, rate in rates.items()
        ]
        self.plan = plan(listed, demands, self.plan, at)
