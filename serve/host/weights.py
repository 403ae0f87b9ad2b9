"""Which weights a generation is made of: found out once, off the event loop, and named to its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from policy.config.deployment import ModelSpec
from policy.errors import EngineFailed, ModelUnavailable
from policy.stats.backoff import Backoff
from store.models.prepare import Origin, origin, prepare
from store.progress import Prepared, Report

# Seconds until a failed attempt is followed by another, doubled each time.
RETRY = Backoff(1.0, 60.0)


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What hosts prepare: ``source``, of the hub by its commit, and the ``digest`` of the content."""

    origin: Origin
    source: str
    digest: str

    @property
    def short(self) -> str:
        """What the digest of a layer carries of it."""
        return self.digest[:8]


def prepare_verified(weights: Weights, *, token_file: str | None, progress: Report) -> Prepared:
    """The weights on this node; blocks.

    Raises :class:`policy.errors.ModelUnavailable`, and :class:`policy.errors.EngineFailed` when this
    node has others. Directories are not compared: their digest is over modification times, which
    differ from copy to copy.
    """
    prepared = prepare(weights.source, token_file=token_file, progress=progress)
    if weights.origin is not Origin.DIRECTORY and prepared.digest != weights.digest:
        raise EngineFailed(
            f"the weights of {weights.source} at {prepared.path} on this node have the digest"
            f" {prepared.digest}, those of the head {weights.digest}: remove this copy to have it made again"
        )
    return prepared


class Resolver:
    """Finds out weights in threads, one per model; ``done`` is called whenever one comes to its end."""

    def __init__(self, monotonic: Callable[[], float], done: Callable[[], None]) -> None:
        self._monotonic = monotonic
        self._done = done
        self._running: dict[str, tuple[ModelSpec, asyncio.Task[Weights]]] = {}
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def weights(self, spec: ModelSpec) -> Weights | None:
        """The weights of ``spec``; ``None`` while they are being found out, or wait for another attempt.

        Raises :class:`policy.errors.ModelUnavailable` once for each attempt that failed.
        """
        begun, task = self._running.get(spec.name, (spec, None))
        if (begun.source, begun.token_file) != (spec.source, spec.token_file):
            self.forget(spec.name)
            task = None
        if task is None:
            if self._monotonic() >= self._retry_at.get(spec.name, 0.0):
                task = asyncio.create_task(asyncio.to_thread(_resolve, spec))
                task.add_done_callback(lambda _: self._done())
                self._running[spec.name] = (spec, task)
            return None
        if not task.done():
            return None
        del self._running[spec.name]
        try:
            found = task.result()
        except (ModelUnavailable, OSError) as error:
            failures = self._failures[spec.name] = self._failures.get(spec.name, 0) + 1
            self._retry_at[spec.name] = self._monotonic() + RETRY.delay_s(failures)
            raise ModelUnavailable(f"the weights are not available: {error}") from error
        self.forget(spec.name)
        return found

    def forget(self, model: str) -> None:
        """Begin anew: what was begun may be out of date, and earlier failures hold nothing back."""
        _, task = self._running.pop(model, (None, None))
        if task is not None:
            task.cancel()
        self._failures.pop(model, None)
        self._retry_at.pop(model, None)


def _resolve(spec: ModelSpec) -> Weights:
    kind = origin(spec.source)
    prepared = prepare(spec.source, token_file=spec.token_file, progress=lambda _: None)
    # A branch of the hub moves on; every replica of a generation is of the same commit.
    pinned = f"{spec.source.partition('@')[0]}@{prepared.digest}" if kind is Origin.HUB else spec.source
    return Weights(origin=kind, source=pinned, digest=prepared.digest)
