"""vLLM's executors and worker for CPUs, with mends that vLLM has no argument for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

# Poll interval of an idle core for the worker's answer, in case it is not woken.
LOOK_MS = 2


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM ships no types
    """The only worker computes in the process of vLLM's engine core: a step sends no messages.

    vLLM itself gives it a process, since OpenMP is bound to cores when a process starts: :func:`bound` does
    that for the core's.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self._is_shared = False

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """vLLM's call for each step."""
        if not self._is_shared:
            self._is_shared = True
            release_threads()
        return super().execute_model(scheduler_output, non_block)


def bound(config: Any) -> AbstractContextManager[None]:
    """While vLLM starts its engine core: OpenMP of that process is bound to the cores of the worker."""
    if config.parallel_config.distributed_executor_backend is not CoreExecutor:
        return nullcontext()
    bind: AbstractContextManager[None] = OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0)
    return bind


def release_threads() -> None:
    """Let the threads that send and receive run on any core of the parent's.

    They inherited the one core to which OpenMP binds the thread that computes.
    """
    names = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
    ids = [number for number, name in names.items() if name.startswith("ZMQ")]
    ids += [each.native_id for each in threading.enumerate() if each.native_id is not None]
    cores = os.sched_getaffinity(os.getppid())
    for number in set(ids) - {threading.get_native_id()}:
        os.sched_setaffinity(number, cores)


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's executor for several workers on CPUs, except that its engine core sleeps while they compute.

    vLLM's own executor busy-waits for the answer on cores that also compute. On two cores a step with one
    request took 67 ms with busy-waiting and 61 ms without, with twelve requests 128 and 103 ms.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            condition = queue._spin_condition
            condition.busy_loop_s = 0.0
            # A wake-up is sometimes lost; vLLM itself polls again after some seconds.
            condition.wait = partial(_rest, condition.wait)


def _rest(wait: Callable[[int], None], timeout_ms: int) -> None:
    wait(min(timeout_ms, LOOK_MS))


class PatchedCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's worker for CPUs, except for the two faults of :meth:`load_model` and :meth:`sample_tokens`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's call at the start; steps without an adapter do without the arithmetic of adapters.

        vLLM skips it for most layers, but multiplies the logits of each request by the last adapter slot, or
        zeros: with 16 requests and a vocabulary of 49,000 that took 28 % of the throughput.
        """
        PunicaWrapperCPU.add_lora_logits = _with_adapters(PunicaWrapperCPU.add_lora_logits)
        PunicaWrapperCPU.add_lora_linear = _with_adapters(PunicaWrapperCPU.add_lora_linear)
        super().load_model(*args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's call for each step; a seeded request may have its prompt computed in several of them.

        A step samples a token for every request. For one whose prompt is not complete the token is discarded,
        and vLLM sets the request's generator back by an offset. Generators of a CPU have none: that ended the
        engine. So what is discarded is sampled without the request's generator.
        """
        runner = self.model_runner
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np
        kept = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)


def _with_adapters(add: Callable[..., None]) -> Callable[..., None]:
    """``add`` of a Punica wrapper, unless no request of the step has an adapter."""

    @wraps(add)
    def added(wrapper: PunicaWrapperCPU, *args: Any, **kwargs: Any) -> None:
        if not wrapper.no_lora:
            add(wrapper, *args, **kwargs)

    return added
