"""Messages between vLLM's front and its engine core, without ``zmq.asyncio``.

That makes futures for each message in either direction, and compares flags as enumerations. A message to an
idle process took 145 to 210 us of processor time with it, and 56 to 80 us without. A step of the engine is
taken where it is read, if it can be, without vLLM's two tasks that pass it on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.asyncio

_READABLE: Final = int(zmq.POLLIN)


def exchange_directly(client: Any) -> CoreReader:
    """Have vLLM's ``AsyncMPClient`` use its sockets directly; called in its event loop, before it reads."""
    output = client.resources.output_socket
    reader = CoreReader(client)
    # A socket of zmq takes attributes for its options alone, but looks its methods up in itself first.
    object.__setattr__(output, "recv_multipart", reader.receive)
    object.__setattr__(output, "close", reader.close)
    client.get_output_async = reader.get_output
    client._send_input_message = CoreWriter(client).send
    return reader


class CoreReader:
    """Reads the socket of the engine's outputs for the ``client``'s tasks, and offers steps first."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._get_output = client.get_output_async
        self._step_ended_at = time.monotonic()
        # Whether vLLM's handler of outputs waits for one: with none before it, a step may be taken.
        self._is_awaited = self._is_closed = False
        self._take: Callable[[Any], bool] | None = None
        socket: zmq.asyncio.Socket = client.resources.output_socket
        self._socket: Any = zmq.Socket.shadow(socket)
        self._close = socket.close
        self._messages: deque[list[Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self._read()

    def take_steps(self, take: Callable[[Any], bool]) -> None:
        """Have ``take`` called with each step (vLLM's ``EngineCoreOutputs``) before vLLM's handler.

        It returns whether it has taken the step; if not, the handler does.
        """
        self._take = take

    async def get_output(self) -> Any:
        """As ``AsyncMPClient.get_output_async``."""
        self._is_awaited = True
        try:
            outputs = await self._get_output()
        finally:
            self._is_awaited = False
        self._step_ended_at = outputs.timestamp
        return outputs

    def step_ended_at(self) -> float:
        """When the engine core ended the step that is handled now, in seconds of ``time.monotonic``.

        The core's thread that sends steps, and this process, may be late with several of them: on a GPU,
        whose steps are short, they came in pairs.
        """
        return self._step_ended_at

    async def receive(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """As ``recv_multipart`` of the socket, with ``copy=False`` and without a limit of time."""
        while not self._messages:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()

    def close(self, linger: int | None = None) -> None:
        """As ``close`` of the socket."""
        self._is_closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._close(linger)

    def _read(self) -> None:
        """Read all that is there, in several turns of the loop: the descriptor says only what was added."""
        while not self._is_closed and self._socket.getsockopt(zmq.EVENTS) & _READABLE:
            message = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._take is not None and not self._messages and self._pass_on(message, self._take):
                # What it wrote leaves before the next step is taken.
                self._loop.call_soon(self._read)
                return
            self._messages.append(message)
        if self._messages and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pass_on(self, message: list[Any], take: Callable[[Any], bool]) -> bool:
        """Pass a step on to ``take`` or to vLLM's handler; returns false, having done nothing, for all else.

        Other messages, and those that cannot be decoded, are for vLLM's task.
        """
        client = self._client
        try:
            client.resources.validate_alive(message)
            outputs = client.decoder.decode(message)
        except Exception:  # noqa: BLE001 - vLLM's task meets it again, and ends all requests
            return False
        if outputs.utility_output:
            return False
        if outputs.outputs or outputs.scheduler_stats:
            queue = client.outputs_queue
            try:
                if not (self._is_awaited and queue.empty() and self._taken(outputs, take)):
                    queue.put_nowait(outputs)
            except Exception as error:  # noqa: BLE001 - as vLLM's task does, for its handler
                queue.put_nowait(error)
        return True

    def _taken(self, outputs: Any, take: Callable[[Any], bool]) -> bool:
        self._step_ended_at = outputs.timestamp
        return take(outputs)


class CoreWriter:
    """Writes to the socket of the engine's requests, which never blocks: vLLM sets no limit to its queue."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._socket: Any = zmq.Socket.shadow(client.input_socket)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done.set_result(None)

    def send(self, message: tuple[Any, ...], engine: bytes) -> asyncio.Future[None]:
        """As ``AsyncMPClient._send_input_message``."""
        self._client.ensure_alive()
        self._socket.send_multipart((engine, *message), zmq.NOBLOCK, copy=False)
        return self._done
