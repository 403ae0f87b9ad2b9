"""Weights of a revision: resolved once by the controller, then verified on every node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from policy.config.deployment import ModelSpec
from policy.errors import EngineFailed, ModelUnavailable
from policy.stats.backoff import Backoff
from store.model_weights.prepare import WeightsOrigin, origin
from store.model_weights.prepare import prepare as prepare_weights
from store.progress_report import PreparedWeights, Report
from store.state_dir import own_directory, private_directory

# The signature of :func:`store.model_weights.prepare.prepare`.
Prepare = Callable[..., PreparedWeights]

# Seconds until a failed attempt is followed by another, doubled each time.
RETRY = Backoff(1.0, 60.0)


class ResolvedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that hosts prepare: ``source`` (a commit, if on the hub) and their ``digest``."""

    origin: WeightsOrigin
    source: str
    digest: str

    @property
    def short(self) -> str:
        """The short form that the digest of a layer includes."""
        return self.digest[:8]


def prepare_verified(
    weights: ResolvedWeights, *, token_file: str | None, progress: Report, prepare: Prepare = prepare_weights
) -> PreparedWeights:
    """Prepare the weights on this node; blocks.

    Raises :class:`policy.errors.ModelUnavailable`, and :class:`policy.errors.EngineFailed` if this node has
    different weights. Directories are not compared: their digest covers modification times, which differ
    between copies.
    """
    prepared = prepare(weights.source, token_file=token_file, progress=progress)
    if weights.origin is not WeightsOrigin.DIRECTORY and prepared.digest != weights.digest:
        raise EngineFailed(
            f"the weights of {weights.source} at {prepared.path} on this node have the digest"
            f" {prepared.digest}, those of the head {weights.digest}: remove this copy to have it made again"
        )
    return prepared


class WeightsResolver:
    """Resolves weights in one thread per model; ``done`` is called whenever a thread ends."""

    def __init__(self, monotonic: Callable[[], float], done: Callable[[], None]) -> None:
        self._monotonic = monotonic
        self._done = done
        self._running: dict[str, tuple[ModelSpec, asyncio.Task[ResolvedWeights]]] = {}
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def weights(self, spec: ModelSpec) -> ResolvedWeights | None:
        """The weights of ``spec``; ``None`` while they are being resolved or wait for a retry.

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
        """Discard results and failures of a model, so that its weights are resolved again."""
        _, task = self._running.pop(model, (None, None))
        if task is not None:
            task.cancel()
        self._failures.pop(model, None)
        self._retry_at.pop(model, None)


def _resolve(spec: ModelSpec) -> ResolvedWeights:
    kind = origin(spec.source)
    prepared = prepare_weights(spec.source, token_file=spec.token_file, progress=lambda _: None)
    # Branches move; all replicas of a revision use the same commit.
    pinned = (
        f"{spec.source.partition('@')[0]}@{prepared.digest}" if kind is WeightsOrigin.HUB else spec.source
    )
    return ResolvedWeights(origin=kind, source=pinned, digest=prepared.digest)


def was_read_before(digest: str) -> bool:
    """Whether these weights were loaded on this node since boot, so that they may be in its page cache."""
    try:
        return (_directory() / digest).exists()
    except OSError:
        return False


def record_read(digest: str) -> None:
    """Record that an engine with these weights became ready on this node."""
    with contextlib.suppress(OSError):
        (_directory() / digest).touch()


def _directory() -> Path:
    return own_directory(private_directory() / "started")
