"""What a router knows and believes of one replica."""

from __future__ import annotations

from policy.affinity import Share, Slots
from policy.engine_model import Timing
from policy.pace import Pace, pace_of
from policy.prefix import Held
from policy.residual import Residual

# Loading a LoRA adapter of rank 16 from a local disk; measured once one was loaded.
ASSUMED_LOAD_S = 0.25


class Site:
    """One replica: its pace, what it holds, its share of the traffic, and how well it was predicted.

    ``load_s`` is what the load of an adapter takes there, in seconds. ``seen_at`` is when it was last
    a candidate.
    """

    __slots__ = ("held", "key", "load_s", "pace", "residual", "seen_at", "share", "slots", "timing")

    def __init__(self, key: int, timing: Timing | None, assumed: Timing, slots: int, begun: int) -> None:
        self.key = key
        self.held = Held()
        self.slots = Slots(slots)
        self.share = Share(begun)
        self.time(timing, assumed)
        self.residual = Residual()
        self.load_s = ASSUMED_LOAD_S
        self.seen_at = 0.0

    def time(self, timing: Timing | None, assumed: Timing) -> None:
        """The replica says how fast it is; what it leaves out is taken from ``assumed``."""
        self.timing = timing
        self.pace: Pace = pace_of(timing, assumed)
        self.share.weight = self.pace.capacity
