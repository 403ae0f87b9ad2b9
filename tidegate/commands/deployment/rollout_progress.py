"""Follows an applied deployment until each model is ready or rolled back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from policy.errors import Unreachable
from serve.controller_api_schema import ControllerStatus, ModelStatus
from tidegate.exit_codes import ExitCode

_POLL_S = 0.25
# Phases in which a target was reached; replicas that leave or come back are no part of it.
_REACHED = ("steady", "idle", "draining the old", "recovering")


class StatusSource(Protocol):
    """Where the status comes from."""

    def status(self) -> ControllerStatus: ...


class RolloutResult(NamedTuple):
    """How it ended: ``OK``, ``ROLLED_BACK``, or ``FAILED`` after the time-out, with the last status."""

    outcome: ExitCode
    models: tuple[ModelStatus, ...]


def follow(
    controller: StatusSource,
    names: Collection[str],
    timeout_s: float,
    show: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RolloutResult:
    """Wait for the models ``names`` for at most ``timeout_s``; ``show`` gets a line for each change."""
    models: tuple[ModelStatus, ...] = ()
    lines: dict[str, str] = {}
    newest: dict[str, int] = {}
    # A model may still be rolling back from what was applied before.
    earlier: dict[str, str] = {}
    deadline = clock() + timeout_s
    while True:
        # A controller that is restarted meanwhile goes on with the rollout.
        with suppress(Unreachable):
            models = tuple(model for model in controller.status().models if model.name in names)
        for model in models:
            newest[model.name] = max(model.generation, newest.get(model.name, 0))
            earlier.setdefault(model.name, model.note)
            if lines.get(model.name) != (line := describe(model)):
                lines[model.name] = line
                show(line)
        done = len(models) == len(names) and all(_is_reached(model) for model in models)
        if done or clock() >= deadline:
            failed = ExitCode.OK if done else ExitCode.FAILED
            return RolloutResult(
                ExitCode.ROLLED_BACK if _rolled_back(models, newest, earlier) else failed, models
            )
        sleep(_POLL_S)


def describe(model: ModelStatus) -> str:
    """The progress of a model in one line."""
    phase = "reading its weights" if model.resolving else model.phase
    line = f"{model.name}: {model.mode}, revision {model.generation}, {model.ready} of {model.target} ready"
    return f"{line}, {phase}" + (f" ({model.note})" if model.note else "")


def _is_reached(model: ModelStatus) -> bool:
    return model.phase in _REACHED and not model.resolving


def _rolled_back(
    models: Sequence[ModelStatus], newest: Mapping[str, int], earlier: Mapping[str, str]
) -> bool:
    """Whether a model has an older revision than it had, or says that it was rolled back, as not at first."""
    return any(
        model.generation < newest[model.name]
        or (model.note.startswith("rolled back from") and model.note != earlier[model.name])
        for model in models
    )
