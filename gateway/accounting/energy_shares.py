"""The energy of each tenant, key, model and adapter: its tokens times the joules that one took meanwhile.

The controller measures the joules and tokens of models and adapters over all hosts; this host's tokens are
those that were added to its ledger since. Energy of minutes without a token is charged to no tenant.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import httpx
import msgspec

from policy.errors import Unreachable
from policy.signals.energy_attribution import BASE, OTHERS
from policy.wire.controller import METRICS, Controllers
from policy.wire.headers import SECRET_HEADER
from policy.wire.metric_definitions import Samples
from store.database import Database
from store.tenancy import ledger
from store.tenancy.ledger import LedgerKey, UsageTotals

EVERY_S = 30.0
TIMEOUT_S = 5.0
Totals = dict[tuple[str, str], tuple[float, float]]


class EnergyShares:
    """``controller`` returns the addresses of the controllers, empty where there is none.

    ``database`` has the ledger.
    """

    def __init__(self, controller: Callable[[], str], secret: str, database: Callable[[], Database]) -> None:
        self._controller = controller
        self._headers = {SECRET_HEADER: secret}
        self._database = database
        self._tokens: Counter[LedgerKey] = Counter()
        self._totals: Totals | None = None

    def added(self, sums: Mapping[LedgerKey, UsageTotals]) -> None:
        """Usage was added to the ledger: count the tokens that were computed."""
        for key, counts in sums.items():
            self._tokens[key] += counts.prompt_tokens - counts.cached_tokens + counts.output_tokens

    def ask(self) -> None:
        """Ask the controller, and attribute the energy since the last time.

        Raises :class:`policy.errors.Unreachable` if it, or the database, does not answer.
        """
        if addresses := self._controller():
            self.attribute(totals_of(self._samples(Controllers(addresses).all)))
        else:
            self._tokens.clear()

    def _samples(self, addresses: Sequence[str]) -> Samples:
        """The metrics of the controller that leads."""
        *others, last = addresses
        for address in others:
            with contextlib.suppress(Unreachable):
                return self._samples([address])
        try:
            answer = httpx.get(
                f"http://{last}{METRICS}", headers=self._headers, timeout=TIMEOUT_S, trust_env=False
            ).raise_for_status()
            return msgspec.json.decode(answer.content, type=Samples)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise Unreachable(f"the controller does not answer ({type(error).__name__})") from error

    def attribute(self, totals: Totals) -> None:
        """Attribute the energy between the last ``totals`` and these; the first ones are a beginning."""
        before, self._totals = self._totals, totals
        if before is None or not totals:
            self._tokens.clear()
            return
        a_token: dict[tuple[str, str], float] = {}
        for key, (joules, tokens) in totals.items():
            last = before.get(key, (0.0, 0.0))
            if joules < last[0] or tokens < last[1]:
                last = 0.0, 0.0  # a new controller counts from 0
            if tokens > last[1]:
                a_token[key] = (joules - last[0]) / (tokens - last[1])
        shares: dict[LedgerKey, UsageTotals] = {}
        for row in tuple(self._tokens):
            model, adapter = row.model, row.adapter or BASE
            joules = a_token.get((model, adapter), a_token.get((model, OTHERS), 0.0))
            if joules:
                shares[row] = counts = UsageTotals()
                counts.joules = joules * self._tokens.pop(row)
        if shares:
            with self._database().writing() as connection:
                ledger.add(connection, shares)


def totals_of(samples: Samples) -> Totals:
    """Joules, and the tokens that they were spent on, by model and adapter."""
    tokens = dict(samples.get("tidegate_energy_tokens", ()))
    joules = samples.get("tidegate_energy_joules", ())
    return {(labels[0], labels[1]): (value, tokens.get(labels, 0.0)) for labels, value in joules}
