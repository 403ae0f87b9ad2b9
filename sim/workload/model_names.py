"""Whom the requests of a trace are for: other people's traces call models by names of their own."""

from __future__ import annotations

from collections.abc import Sequence

from policy.errors import ConfigError
from sim.arrival import Arrival


class ModelNames:
    """Finds out for which of the models ``names`` requests are.

    ``others`` are the names that the requests so far had for the only model there is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.others: set[str] = set()

    def of(self, arrival: Arrival) -> str:
        """The model it names, the first where it names none, the only one whatever it names.

        Raises :class:`policy.errors.ConfigError` where it is one of several and named otherwise.
        """
        name = arrival.model
        if name in self._names:
            return name
        if name:
            if len(self._names) > 1:
                expected = f"one of: {', '.join(self._names)} (a workload can rename: mix[].model)"
                raise ConfigError("the trace's model", name, expected)
            self.others.add(name)
        return self._names[0]

    def description(self) -> str:
        """A note about requests that named the only model otherwise; empty if none did."""
        if not self.others:
            return ""
        return f"{self._names[0]}: takes the requests for {', '.join(sorted(self.others))}, as the only model"
