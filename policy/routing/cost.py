"""What a replica would cost a request: the seconds to its first token there, term by term.

A term is a function here, or a part of :func:`estimate`; :class:`CostEstimate` has a field for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policy.engine.model import Timing
from policy.request import Request
from policy.routing.prediction_error import LEAST
from policy.routing.replica_state import ReplicaState


@dataclass(slots=True, eq=False)
class Candidate:
    """A replica as the router sees it; whoever owns the connection to it keeps it true.

    ``key`` is a 64-bit hash of ``id`` that every process computes alike. ``in_flight`` counts
    requests that are there now, ``bound`` how many it takes (0: none stated), ``pending_tokens`` their
    prompt tokens that are not computed yet, ``turned_at`` when it turned to the first of them, and
    ``begun`` the requests ever sent there by this host.
    ``kv_used`` is a fraction. ``timing`` is what the replica said of its own speed, if it did.
    """

    id: str
    key: int
    bound: int = 0
    in_flight: int = 0
    pending_tokens: int = 0
    turned_at: float = 0.0
    begun: int = 0
    kv_used: float = 0.0
    timing: Timing | None = None


class CostEstimate(NamedTuple):
    """Predicted seconds to the first token at one candidate, term by term.

    ``burden`` is no part of it: what the choice costs others, in seconds (a prefill that they wait for,
    an adapter that is evicted, a share of the traffic above the bound). ``uncached`` are the prompt
    tokens to compute there, ``modelled`` the seconds by the engine model alone, ``age`` the tokens that
    the replica was given since it last used what is cached there of the prompt, ``loads`` the loads of
    adapters that its first token waits for, its own among them.
    """

    candidate: Candidate
    wait: float = 0.0
    prefill: float = 0.0
    adapter: float = 0.0
    pressure: float = 0.0
    burden: float = 0.0
    uncached: int = 0
    modelled: float = 0.0
    age: int = 0
    loads: int = 0

    @property
    def total(self) -> float:
        """The predicted time to the first token in seconds."""
        return self.wait + self.prefill + self.adapter + self.pressure


def adapter_load_s(request: Request, site: ReplicaState) -> float:
    """The load of its adapter, where it is not believed resident."""
    return 0.0 if request.adapter_key in site.slots else site.load_s


def pressure_s(request: Request, candidate: Candidate, site: ReplicaState, uncached: int) -> float:
    """The KV tokens that it finds no room for, computed again by whoever is preempted.

    Of a replica that says how many it has.
    """
    pace = site.pace
    wanted = site.kv_tokens + candidate.pending_tokens + uncached + request.output_tokens
    return (wanted - pace.kv_tokens) / pace.capacity if wanted > pace.kv_tokens else 0.0


def estimate(  # noqa: PLR0917 - names cost a router a tenth of it
    request: Request, candidate: Candidate, site: ReplicaState, uncached: int, slope: float, fixed_s: float
) -> tuple[float, float, float, float, float, float]:
    """All terms, in the order of :class:`CostEstimate`'s fields, as first tokens bear them out.

    They taught ``slope`` and ``fixed_s`` (:class:`policy.routing.prediction_error.OnlineLine`); the load of
    an adapter is measured as it is. Also returns the seconds of the request's own prefill without the fixed
    part, and those of the engine model alone.

    The wait lasts until the replica starts on it: for adapters that are loaded, for prompts that came before
    or half a step, and for a free sequence. The prefill is that of its own uncached prompt, in the steps of
    those that came before.
    """
    pace, tokens, shared = site.pace, uncached, 0.0
    if not site.ahead_s:
        waits = site.still_s
    elif (since := site.seen_at - candidate.turned_at) < 0.0:  # it will turn to all of them together
        waits = site.ahead_s + site.seat_s - since
        tokens, shared = candidate.pending_tokens + uncached, site.ahead_s
    else:  # the step that computes the first of them is under way, and lasts no longer than that takes
        most = 0.9 * site.first_s
        waits = site.first_s - (since if since < most else most) + site.rest_s + site.seat_s
        tokens, shared = site.rest + uncached, site.rest_s
    own = pace.prefill_s(tokens, site.kv_tokens, site.running) - shared
    loads = adapter_load_s(request, site) if request.adapter_key else 0.0
    presses = pressure_s(request, candidate, site, uncached) if pace.kv_tokens else 0.0
    modelled = waits + own + presses
    own *= slope
    floor, took = LEAST * own, own + fixed_s
    waits *= slope
    if site.loads:
        ahead = site.loads_s(site.seen_at, candidate.turned_at)
        # Between two loads all that is loaded gets its turn.
        if ahead > site.load_s and (not request.adapter_key or site.slots.loaded(request.adapter_key)):
            ahead = site.load_s
        waits += ahead
    return waits, took if took > floor else floor, loads, presses * slope, own, modelled
