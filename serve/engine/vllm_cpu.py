"""vLLM's executor and worker for CPUs, with three mends that vLLM has no argument for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

# Poll interval of an idle core for the worker's answer, in case it is not woken.
LOOK_MS = 2


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's executor for CPUs, except that its engine core sleeps while the worker computes.

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


class MendedWorker(CPUWorker):  # type: ignore[misc]  # vLLM ships no types
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
