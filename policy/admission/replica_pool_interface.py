"""The replicas of one model as the dispatcher uses them: the port of the gateway and of the simulator."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol, TypeVar

from policy.admission.queue import QueueLimits
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.replica_health import CircuitBreaker
from policy.types import Priority


class DispatchableReplica(Protocol):
    """A replica as a ticket uses it."""

    breaker: CircuitBreaker

    def begin(self, tokens: int) -> bool:
        """Take a slot for a request with ``tokens`` uncached prompt tokens; returns whether it is the probe
        that a half-open breaker waits for."""

    def first_token(self, tokens: int, at: float) -> None:
        """The prefill of such a request is over."""

    def end(self) -> None:
        """Free the slot."""


R_co = TypeVar("R_co", bound=DispatchableReplica, covariant=True)


class ReplicaPool(Protocol[R_co]):
    """The replicas of one model with their router: what a dispatcher asks of the process that it runs in."""

    @property
    def ready(self) -> bool:
        """Whether any replica serves requests, even if it has no room now."""

    @property
    def down(self) -> bool:
        """Whether the fleet has no replica of the model that is ready."""

    @property
    def closing(self) -> bool:
        """Whether some replicas will drain at a known instant: see :meth:`lasting`."""

    @property
    def gives_way(self) -> bool:
        """Whether some replicas have drained for others that are still to come."""

    def ttft_slo_s(self, priority: Priority) -> float | None:
        """The TTFT SLO of the model for requests of ``priority``, in seconds."""

    def bounds(self, request: Request, queued: int) -> QueueLimits:
        """How much may wait for the model when ``request`` comes while ``queued`` others wait."""

    def candidates(self) -> list[Candidate]:
        """The replicas to which a request may be sent now, whether or not they have room, as they are now."""

    def full(self) -> list[Candidate]:
        """The replicas that are no candidates only because they refused a request for lack of room."""

    def replica(self, candidate: Candidate) -> R_co: ...

    def serves(self, candidate: Candidate, adapter: str) -> bool: ...

    def unserved(self, adapters: Set[str], candidates: list[Candidate]) -> set[str]:
        """Those of ``adapters`` that none of ``candidates`` :meth:`serves`; there may be thousands."""

    def choose(self, request: Request, candidates: list[Candidate], at: float) -> CostEstimate | None:
        """The router's choice, ``None`` if the request should wait."""

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        """Seconds of prefill that it is expected to lose if it does not go to this one of ``replicas``."""

    def unavailable(self, at: float) -> bool:
        """Whether no replica is up and none is starting, so that waiting is useless."""

    def cannot_load(self, adapter: str) -> bool:
        """Whether every replica that is up has failed to load ``adapter``."""

    def service_s(self, request: Request) -> float:
        """How long the request would run on the fullest replica, by its performance model; 0 without one."""

    def remaining_s(self, request: Request, quote: CostEstimate, ran_s: float) -> float:
        """How long the request is expected to run on where ``quote`` sent it ``ran_s`` seconds ago."""

    def lasting(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        """Those of ``candidates`` that serve until the request has ended, even if its answer is long.

        One with no more tokens of any kind has all of them: dispatch asks for such a one first.
        """

    def sent(self, request: Request, quote: CostEstimate, at: float) -> tuple[int, ...]:
        """The request goes to ``quote.candidate``; returns the prefix hashes that are new there."""

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        """Its first token came ``ttft_s`` seconds after it was sent."""

    def paced(self, quote: CostEstimate, gap_s: float) -> None:
        """An answer ended whose tokens were ``gap_s`` seconds apart on average."""

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """The engine counted the tokens of the request and its answer."""

    def queued(self, change: int, rank: int) -> None:
        """Publish by how many the waiting requests of the rank changed, for other workers to see."""

    def granted(self, candidates: list[Candidate], rank: int, waiting: int, at: float) -> list[Candidate]:
        """Those whose next slot is not left to requests in other workers of this host.

        It is for a request of ``rank``, of which ``waiting`` wait here.
        """
