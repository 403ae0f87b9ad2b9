"""Messages with an engine core: the sockets are real, the core is this test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from serve.engine.fast_path.engine_core_sockets import exchange_directly
from tests.serve.sim_driver import until


class Outputs:
    """What an engine core sent: a step with outputs, counts alone, an answer to a call, or nothing."""

    def __init__(self, name: str) -> None:
        if name == "broken":
            raise ValueError(name)
        self.outputs = [name] if name.startswith("step") else []
        self.scheduler_stats = name if name == "counts" else None
        self.utility_output = name if name == "call" else None
        # The second in which the core made it.
        self.timestamp = float(name.rpartition(" ")[2]) if name[-1].isdigit() else 0.0


class Core:
    """An engine core's two sockets, and the front's ``client``, as vLLM makes them."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        output, given = self.context.socket(zmq.PULL), self.context.socket(zmq.ROUTER)
        output.bind(f"ipc://{folder}/out")
        given.bind(f"ipc://{folder}/in")
        self.outputs: Any = zmq.Socket.shadow(self.context.socket(zmq.PUSH))
        self.requests: Any = zmq.Socket.shadow(self.context.socket(zmq.DEALER))
        self.requests.setsockopt(zmq.IDENTITY, b"\0\0")
        self.outputs.connect(f"ipc://{folder}/out")
        self.requests.connect(f"ipc://{folder}/in")
        self.requests.send(b"ready")
        assert zmq.Socket.shadow(given).poll(5000)
        zmq.Socket.shadow(given).recv_multipart()
        self.dead = False
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.client: Any = SimpleNamespace(
            resources=SimpleNamespace(output_socket=output, validate_alive=lambda _: self._check()),
            decoder=SimpleNamespace(decode=lambda frames: Outputs(frames[0].bytes.decode())),
            outputs_queue=self.queue,
            get_output_async=self._get_output,
            input_socket=given,
            ensure_alive=self._check,
        )

    def _check(self) -> None:
        if self.dead:
            raise RuntimeError("dead")

    async def _get_output(self) -> Any:
        if isinstance(outputs := await self.queue.get(), Exception):
            raise outputs
        return outputs

    async def read(self) -> list[bytes]:
        async with asyncio.timeout(10):
            return [
                frame.bytes for frame in await self.client.resources.output_socket.recv_multipart(copy=False)
            ]


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path)
    yield made
    made.context.destroy(linger=0)


async def test_outputs_come_in_order_whenever_they_were_sent(core: Core) -> None:
    core.outputs.send_multipart([b"before"])
    exchange_directly(core.client)
    assert await core.read() == [b"before"]
    for burst in (1, 2, 300, 1):
        waiting = asyncio.create_task(core.read())
        await asyncio.sleep(0)
        sent = [[b"%d" % n, b"x" * (n * 1000 % 70_001)] for n in range(burst)]
        for message in sent:
            core.outputs.send_multipart(message)
        assert [await waiting, *[await core.read() for _ in sent[1:]]] == sent


async def test_a_reader_that_was_cancelled_loses_no_output(core: Core) -> None:
    exchange_directly(core.client)
    waiting = asyncio.create_task(core.read())
    await asyncio.sleep(0)
    waiting.cancel()
    core.outputs.send_multipart([b"later"])
    assert await core.read() == [b"later"]


async def test_requests_arrive_in_order(core: Core) -> None:
    exchange_directly(core.client)
    for n in range(100):
        await core.client._send_input_message((b"%d" % n, memoryview(b"y" * n * 1000)), b"\0\0")
    for n in range(100):
        assert core.requests.poll(5000)
        assert core.requests.recv_multipart() == [b"%d" % n, b"y" * n * 1000]


async def test_a_dead_core_gets_no_request(core: Core) -> None:
    exchange_directly(core.client)
    core.dead = True
    with pytest.raises(RuntimeError, match="dead"):
        core.client._send_input_message((b"x",), b"\0\0")


async def test_a_closed_socket_is_read_no_more(core: Core) -> None:
    exchange_directly(core.client)
    output = core.client.resources.output_socket
    descriptor = output.getsockopt(zmq.FD)
    output.close(linger=0)
    assert output.closed
    assert not asyncio.get_running_loop().remove_reader(descriptor)


async def test_a_step_is_taken_where_it_is_read_unless_another_is_before_it(core: Core) -> None:
    taken: list[str] = []

    def take(outputs: Outputs) -> bool:
        if outputs.outputs == ["step fails"]:
            raise OSError("full")
        if not outputs.outputs or "left" in outputs.outputs[0]:
            return False
        taken.extend(outputs.outputs)
        asyncio.get_running_loop().call_soon(taken.append, "written")
        return True

    reader = exchange_directly(core.client)
    reader.take_steps(take)

    def send(*names: str) -> None:
        for name in names:
            core.outputs.send_multipart([name.encode()])

    # vLLM's handler of outputs is busy with something else.
    send("step 0")
    await until(lambda: core.queue.qsize() == 1)
    waiting = [asyncio.create_task(core.client.get_output_async()) for _ in range(2)]
    await until(waiting[0].done)
    assert (await waiting[0]).outputs == ["step 0"]
    waiting.append(asyncio.create_task(core.client.get_output_async()))
    await asyncio.sleep(0)
    send("step 1", "step 2", "nothing", "step 3")
    await until(lambda: len(taken) == 6)
    assert taken == ["step 1", "written", "step 2", "written", "step 3", "written"]
    send("step left 4")
    assert (await waiting[1]).outputs == ["step left 4"]
    send("counts")
    assert (await waiting[2]).scheduler_stats == "counts"
    failing = asyncio.create_task(core.client.get_output_async())
    await asyncio.sleep(0)
    send("step fails")
    with pytest.raises(OSError, match="full"):
        await failing
    assert len(taken) == 6


async def test_a_step_does_not_overtake_what_vllm_has_not_read(core: Core) -> None:
    order: list[str] = []
    reader = exchange_directly(core.client)
    reader.take_steps(lambda outputs: not order.append(outputs.outputs[0]))

    async def read_the_others() -> None:
        while True:
            order.append((await core.read())[0].decode())

    tasks = [asyncio.create_task(core.client.get_output_async()), asyncio.create_task(read_the_others())]
    await asyncio.sleep(0)
    # How many of them arrive at once is up to the socket's thread.
    sent = [
        name
        for n in range(0, 300, 3)
        for name in (f"step {n}", "call", f"step {n + 1}", "broken", f"step {n + 2}")
    ]
    for name in sent:
        core.outputs.send_multipart([name.encode()])
    await until(lambda: len(order) == len(sent))
    assert order == sent
    for task in tasks:
        task.cancel()


async def test_nothing_of_a_dead_core_is_taken(core: Core) -> None:
    taken: list[Outputs] = []
    reader = exchange_directly(core.client)
    reader.take_steps(lambda outputs: not taken.append(outputs))
    waiting = asyncio.create_task(core.client.get_output_async())
    await asyncio.sleep(0)
    core.dead = True
    core.outputs.send_multipart([b"step"])
    assert await core.read() == [b"step"]
    waiting.cancel()
    assert not taken


async def test_a_step_ended_when_the_core_made_it_and_not_when_a_busy_process_reads_it(core: Core) -> None:
    ended: list[tuple[str, float]] = []

    def take(outputs: Outputs) -> bool:
        if outputs.outputs[0].startswith("step left"):
            return False
        ended.append((outputs.outputs[0], reader.step_ended_at()))
        return True

    reader = exchange_directly(core.client)
    reader.take_steps(take)
    waiting = asyncio.create_task(core.client.get_output_async())
    await asyncio.sleep(0)
    for name in ("step 1", "step 2", "step left 3", "step 4"):
        core.outputs.send_multipart([name.encode()])
    assert (await waiting).outputs == ["step left 3"]
    assert ended == [("step 1", 1.0), ("step 2", 2.0)]
    assert reader.step_ended_at() == 3.0, "vLLM handles it, while others come"
    await until(lambda: core.queue.qsize() == 1)
    assert (await core.client.get_output_async()).outputs == ["step 4"]
    assert reader.step_ended_at() == 4.0


async def test_a_socket_that_is_closed_after_a_step_is_read_no_more(core: Core) -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    output = core.client.resources.output_socket

    def take(outputs: Outputs) -> bool:
        output.close(linger=0)
        return bool(outputs.outputs)

    reader = exchange_directly(core.client)
    reader.take_steps(take)
    waiting = asyncio.create_task(core.client.get_output_async())
    await asyncio.sleep(0)
    core.outputs.send_multipart([b"step"])
    await until(lambda: output.closed)
    await asyncio.sleep(0)
    assert not failures
    waiting.cancel()
