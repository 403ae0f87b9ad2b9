"""The supervisor's Unix socket: a request is one line of JSON, an answer is lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from policy.errors import TidegateError, Unreachable
from policy.wire.controller import error_of, problem_of
from store.state_dir import StateDir
from tidegate.supervisor.progress_events import ProgressEvent

_LINE_BYTES = 32 * 1024 * 1024
_ANSWER_S = 30.0


class SupervisorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``follow`` and ``stop`` are answered with events, ``status`` and ``apply`` with one status."""

    command: Literal["status", "follow", "stop", "apply"]
    document: Any = None


class SupervisorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's state; ``since`` is its start in Unix seconds."""

    pid: int
    since: float
    phase: Literal["starting", "ready", "stopping"]
    actuator: Literal["ray", "local", "external", "remote"]
    endpoint: str
    admin: str
    processes: tuple[ProcessStatus, ...]
    document: Any


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A child process; ``pid`` is 0 between two runs."""

    name: str
    pid: int
    restarts: int
    up_s: float


class SupervisorResponseLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an answer, with one field; ``problem`` is ``problem_of`` with ``kind`` for ``type``."""

    event: ProgressEvent | None = None
    status: SupervisorStatus | None = None
    problem: dict[str, Any] | None = None


async def serve(
    path: Path, answers: Callable[[SupervisorRequest], AsyncIterator[SupervisorResponseLine]]
) -> asyncio.Server:
    """Listen at ``path``, which only this user can open; ``answers`` gives the lines of each answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                request = msgspec.json.decode(await reader.readline(), type=SupervisorRequest)
                async for line in answers(request):
                    writer.write(msgspec.json.encode(line) + b"\n")
                    await writer.drain()
            except ConnectionError:
                raise
            except (TidegateError, msgspec.MsgspecError, ValueError, OSError) as error:
                problem = problem_of(error if isinstance(error, TidegateError) else TidegateError(str(error)))
                problem["kind"] = problem.pop("type")
                writer.write(msgspec.json.encode(SupervisorResponseLine(problem=problem)) + b"\n")
                await writer.drain()
            finally:
                writer.close()

    path.unlink(missing_ok=True)  # noqa: ASYNC240 - once, before the first client
    mask = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(answer, path, limit=_LINE_BYTES)
    finally:
        os.umask(mask)


class SupervisorClient:
    """A blocking client; raises :class:`policy.errors.Unreachable` when no supervisor answers."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def status(self) -> SupervisorStatus:
        return self._one(SupervisorRequest(command="status"), _ANSWER_S)

    def apply(self, document: object, timeout_s: float = 120.0) -> SupervisorStatus:
        """Replace the deployment, whole or not at all; raises the supervisor's error."""
        return self._one(SupervisorRequest(command="apply", document=document), timeout_s)

    def follow(self) -> Iterator[ProgressEvent]:
        """The events of the start, until it is ready or has failed."""
        return self._events("follow")

    def stop(self) -> Iterator[ProgressEvent]:
        """Request an orderly stop; its events until the supervisor exits."""
        return self._events("stop")

    def _one(self, request: SupervisorRequest, timeout_s: float) -> SupervisorStatus:
        for line in self._lines(request, timeout_s):
            if line.status is not None:
                return line.status
        raise Unreachable("the supervisor exited before it answered")

    def _events(self, command: Literal["follow", "stop"]) -> Iterator[ProgressEvent]:
        # No timeout: the kernel closes the socket of a supervisor that dies.
        lines = self._lines(SupervisorRequest(command=command), None)
        return (line.event for line in lines if line.event is not None)

    def _lines(self, request: SupervisorRequest, timeout_s: float | None) -> Iterator[SupervisorResponseLine]:
        path = self._state.socket_path
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            try:
                if path.stat().st_uid != os.getuid():
                    raise Unreachable(f"{path} belongs to another user")
                sock.connect(os.fspath(path))
                sock.sendall(msgspec.json.encode(request) + b"\n")
                with sock.makefile("rb") as file:
                    for raw in file:
                        line = msgspec.json.decode(raw, type=SupervisorResponseLine)
                        if line.problem is not None:
                            raise error_of({**line.problem, "type": line.problem["kind"]}, TidegateError)
                        yield line
            except (FileNotFoundError, ConnectionRefusedError):
                raise Unreachable(f"Nothing is running on {self._state.root}.") from None
            except (OSError, msgspec.MsgspecError) as error:
                raise Unreachable(f"no supervisor answers at {path}: {error}") from error
