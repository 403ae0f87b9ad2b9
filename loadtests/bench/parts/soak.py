"""Part 5: memory over many requests, and how it rises."""

from __future__ import annotations

import asyncio

import msgspec

from loadtests.bench.client import Load
from loadtests.bench.figures import slope
from loadtests.bench.parts.cost import check
from loadtests.bench.plan import Plan, log
from loadtests.bench.replica import Setting
from loadtests.bench.systems import Running, System, running
from loadtests.bench.upstream_answers import BODY
from loadtests.bench.upstream_process import Mock
from loadtests.bench.workload import Sized

BATCH = 10_000
CLIENTS = 32


class Soak(msgspec.Struct, kw_only=True):
    """Resident bytes after so many requests, and bytes a request from the second quarter on."""

    requests: list[int]
    memory: list[int]
    bytes_per_request: float
    cpu_us: float


async def measure(system: System, upstream: Mock, plan: Plan) -> Soak:
    """``plan.soak`` short requests, closed loop, read every batch."""
    upstream.configure(Setting())
    with running(system, upstream.urls, plan.gateway_cores) as each:
        return await _soak(each, plan)


async def _soak(each: Running, plan: Plan) -> Soak:
    request = Sized(110, plan.prefixes)
    batch = max(8, min(BATCH, plan.soak // 10))
    requests, memory = [0], [each.tree.memory()]
    began = each.tree.cpu_s()
    while requests[-1] < plan.soak:
        check(await Load(each.port, request, BODY).closed(batch, CLIENTS), each.system.name)
        requests.append(requests[-1] + batch)
        memory.append(each.tree.memory())
        if len(memory) % 10 == 1:
            log(f"soak {requests[-1]}/{plan.soak}: {memory[-1] / 2**20:.1f} MiB")
        await asyncio.sleep(0)
    settled = len(memory) // 4
    return Soak(
        requests=requests,
        memory=memory,
        bytes_per_request=slope(requests[settled:], memory[settled:]),
        cpu_us=1e6 * (each.tree.cpu_s() - began) / requests[-1],
    )
