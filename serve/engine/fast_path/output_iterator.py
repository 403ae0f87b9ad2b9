"""The outputs of one request, as vLLM's generators read them.

Apart from the code that drives them: what becomes machine code has no coroutines of this kind.
"""

from __future__ import annotations

import types
from collections.abc import Generator
from typing import Any


class EngineOutputs:
    """The outputs of one request, as vLLM's serving code reads them: an async iterator without a task.

    A reader that waits is suspended until its driver has given it an output and resumes it.
    """

    def __init__(self) -> None:
        self.next: Any = None
        self.finished = False

    def __aiter__(self) -> EngineOutputs:
        return self

    @types.coroutine
    def __anext__(self) -> Generator[None, None, Any]:
        while self.next is None:
            if self.finished:
                raise StopAsyncIteration
            yield
        output, self.next = self.next, None
        if isinstance(output, BaseException):
            raise output
        return output

    async def aclose(self) -> None:
        """Called by a reader that stops early."""
