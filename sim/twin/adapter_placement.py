"""The controller's placement of one model's adapters in virtual time: heartbeats in, a plan, orders out.

The plan is production's own, made from request rates alone. :mod:`serve.adapters.placement` also uses rising
rates and the requests that wait for a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policy.placement.plan import plan
from policy.placement.slots import HALF_LIFE_S
from policy.placement.types import EMPTY, Demand, Host, Plan
from policy.stats.decay import DecayingCount
from sim.twin.adapter_slots import TwinSlots


class TwinPlacement:
    """The last plan and the demand it is made from; a load takes ``load_s`` seconds.

    ``key`` gives an adapter's 64-bit hash. Instants are seconds of the run.
    """

    def __init__(self, load_s: float, key: Callable[[str], int]) -> None:
        self.plan: Plan = EMPTY
        self._load_s = load_s
        self._key = key
        self._demand: dict[str, DecayingCount] = {}
        # Since the last plan: the sum of requests in flight over heartbeats, and the number of heartbeats.
        self._in_flight = self._beats = 0

    def beat(self, replica: str, slots: TwinSlots, in_flight: int, at: float) -> None:
        """A heartbeat: count the new requests and those in flight, and hand the plan to the replica."""
        for adapter, requests in slots.requests.items():
            self._demand.setdefault(adapter, DecayingCount(HALF_LIFE_S)).add(at, requests)
        slots.requests.clear()
        self._in_flight += in_flight
        self._beats += 1
        slots.plan(self.plan.hold.get(replica, ()))

    def replan(self, hosts: Iterable[Host], at: float) -> None:
        """Plan for these replicas."""
        listed = list(hosts)
        rates = {adapter: requests.rate(at) for adapter, requests in self._demand.items()}
        # Little's law: the mean number of requests in flight over their arrival rate.
        in_flight = self._in_flight * len(listed) / self._beats if self._beats else 0.0
        service_s = in_flight / sum(rates.values()) if rates else 0.0
        self._in_flight = self._beats = 0
        demands = [
            Demand(name=name, key=self._key(name), rate=rate, load_s=self._load_s, service_s=service_s)
            for name, rate in rates.items()
        ]
        self.plan = plan(listed, demands, self.plan, at)
