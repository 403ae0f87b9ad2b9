"""Step samples of a model's engines, read from the controller by a thread while clients drive them."""

from __future__ import annotations

import threading
from types import TracebackType

from policy.engine.model import Limits
from policy.engine.step_samples import StepSample
from policy.errors import TidegateError
from serve.autoscaler.step_feed import StepLine
from serve.controller.client import ControllerClient

# An engine tells of a step after at most so long: twice a second through its host, ten times through its own.
SETTLED_S = 1.0


class StepListener:
    """Listens from when it is entered. What engines said last of themselves is kept."""

    def __init__(self, client: ControllerClient, model: str) -> None:
        self._client = client
        self._model = model
        self._lock = threading.Lock()
        self._samples: list[StepSample] = []
        self._error: TidegateError | None = None
        self._listening = threading.Event()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.hardware = ""
        self.limits: Limits | None = None
        self.shapes: set[str] = set()

    def __enter__(self) -> StepListener:
        """Returns once it listens; raises the controller's refusals."""
        self._thread.start()
        self._listening.wait()
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()

    def check(self) -> None:
        """Raises what ended it, if anything did."""
        if self._error is not None:
            raise self._error

    def take(self) -> list[StepSample]:
        """The steps since the last call; raises as :meth:`check` does."""
        self.check()
        with self._lock:
            taken, self._samples = self._samples, []
        return taken

    def _listen(self) -> None:
        try:
            for line in self._client.steps(self._model):
                self._take(line)
                self._listening.set()
                if self._left.is_set():
                    return
        except TidegateError as error:
            self._error = error
        finally:
            self._listening.set()

    def _take(self, line: StepLine) -> None:
        if line.engine is None:
            return
        with self._lock:
            self._samples += line.engine.steps
            self.shapes.add(line.shape)
            self.hardware = line.engine.hardware
            if line.engine.timing is not None:
                self.limits = line.engine.timing.limits
