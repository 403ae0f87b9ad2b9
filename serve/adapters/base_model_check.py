"""Checks stored adapters again when the source of their base model changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec

from policy.errors import TidegateError
from policy.stats.backoff import Backoff
from serve.adapters.adapter_registry import AdapterRegistry
from serve.adapters.add_job_state import Key
from store.state_dir import StateDir

log = logging.getLogger("tidegate.adapters")

STEP_S = 1.0
# Delays between attempts to read a base model.
RETRY = Backoff(5.0, 300.0)


class CheckedBase(msgspec.Struct, frozen=True, kw_only=True):
    """The base model that a model's adapters were checked with, and why some do not fit, by digest."""

    source: str
    unfit: dict[str, str] = {}


class BaseModelChecker:
    """Compares the sources of the models with those that their adapters were validated for.

    Adapters that do not fit the new base model are still served, for the deployment file has asked for it;
    the status says why they do not fit, until an import of them succeeds. What was found is stored in the
    state directory. A model that is not there yet is taken to have the base model of its adapters.
    """

    def __init__(self, library: AdapterRegistry, state: StateDir, event: Callable[[str], None]) -> None:
        self._library = library
        self._state = state
        self._event = event
        self._checked: dict[str, CheckedBase] = {}
        with suppress(msgspec.DecodeError):  # of another version: the base models count as checked
            self._checked = state.load(state.checked_bases_path, dict[str, CheckedBase]) or {}
        library.unfit = {model: dict(checked.unfit) for model, checked in self._checked.items()}

    async def run(self) -> None:
        """Check until cancelled. A base model may have to be fetched, which takes long."""
        failures = 0
        while True:
            try:
                await self.step()
                failures = 0
            except (TidegateError, OSError) as error:
                failures += 1
                self._event(f"adapters: they cannot be checked with their base model: {error}")
            except Exception:
                failures += 1
                log.exception("adapters")
            await asyncio.sleep(RETRY.delay_s(failures) if failures else STEP_S)

    async def step(self) -> None:
        """Check the adapters of models whose source has changed; store what is new."""
        if not self._library.is_open:
            return
        for spec in self._library.specs():
            last = self._checked.get(spec.name)
            if last is not None and last.source != spec.source:
                unfit = await self._library.refusals(spec, last.source)
                self._library.unfit[spec.name] = unfit
                if unfit:
                    self._event(f"adapters: {len(unfit)} versions on {spec.name} do not fit {spec.source}")
            unfit = self._library.unfit.setdefault(spec.name, {})
            now = CheckedBase(source=spec.source, unfit=dict(unfit))
            if now != last:
                checked = self._checked | {spec.name: now}
                self._state.save(self._state.checked_bases_path, checked)
                self._checked = checked

    def notes(self) -> dict[Key, str]:
        """The names with a version that does not fit, each with the first such version and the reason."""
        found = {}
        for spec in self._library.specs():
            unfit = self._library.unfit.get(spec.name, {})
            for alias in self._library.catalog.of(spec.name) if unfit else ():
                for version in alias.versions:
                    if version.digest in unfit:
                        reason = unfit[version.digest]
                        found[alias.model, alias.name] = f"v{version.number} does not fit the model: {reason}"
                        break
        return found
