"""Failures of the control loop by model: one model's failure is recorded, and the others continue."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from policy.errors import TidegateError

log = logging.getLogger("tidegate.controller")


def describe(error: BaseException) -> str:
    """What failed; for an unexpected error also its class and where it was raised."""
    if isinstance(error, (TidegateError, OSError)):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


class ModelFailures:
    """The last failure of each part of the control loop for each model, until that part succeeds."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self._event = event
        self._failed: dict[tuple[str, str], str] = {}
        # The parts that failed since the last call of `take`.
        self._fresh = False

    @contextmanager
    def recorded(self, model: str, part: str) -> Iterator[None]:
        """Record an error of ``part`` as the model's failure, instead of raising it."""
        try:
            yield
        except Exception as error:
            text = describe(error)
            # Each attempt may fail: one traceback and one event for each new failure.
            if self._failed.get((model, part)) != text:
                if not isinstance(error, (TidegateError, OSError)):
                    log.exception("%s: %s failed", model, part)
                self._event(f"{model}: {part} failed: {text}")
            self._failed[model, part] = text
            self._fresh = True
        else:
            self._failed.pop((model, part), None)

    @property
    def models(self) -> frozenset[str]:
        """The models for which something fails."""
        return frozenset(model for model, _ in self._failed)

    def note(self, model: str) -> str:
        """What fails for ``model``, or an empty string."""
        failed = self._failed.items()
        return "; ".join(f"{part} failed: {text}" for (name, part), text in failed if name == model)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._failed = {key: text for key, text in self._failed.items() if key[0] != model}

    def take(self) -> bool:
        """Whether anything failed since the last call."""
        fresh, self._fresh = self._fresh, False
        return fresh
