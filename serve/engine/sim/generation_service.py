"""The service that all endpoints use: it turns request parameters into a generation in the step loop."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from policy.types import Runner
from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.metrics import SimEngineMetrics
from serve.engine.sim.pseudo_tokenizer import (
    GeneratedText,
    TokenizedPrompt,
    call,
    natural_length,
    seed_of,
    write,
)
from serve.engine.sim.sampling_parameters import GenerationFields, check
from serve.engine.sim.step_loop import Generation, StepLoop
from serve.engine.sim.tool_calls import ToolSet


def now() -> int:
    """Whole Unix seconds, for the ``created`` fields of answers."""
    return int(time.time())


@dataclass(slots=True, eq=False)
class GenerationService:
    """One engine for its endpoints; it was ``created`` at that instant (whole Unix seconds)."""

    model: str
    adapters: dict[str, str]
    runner: Runner
    max_model_len: int
    seed: int
    loop: StepLoop
    metrics: SimEngineMetrics
    has_adapters: bool = False
    created: int = field(default_factory=now)

    def resolve(self, model: str | None) -> str:
        """The model or adapter that ``model`` names, by default the base; raises 404 for any other name."""
        if not model or model == self.model or model in self.adapters:
            return model or self.model
        raise ApiError(404, f"The model `{model}` does not exist.", "model")

    def generate(
        self, prompts: Sequence[TokenizedPrompt], sampling: GenerationFields, tools: ToolSet | None = None
    ) -> Generation:
        """Start the choices of each prompt; choice i of prompt j has index ``j n + i``, and may call a tool.

        Raises a 404 for an unknown model, and a 400 for parameters that are not valid together or when a
        prompt leaves no room in the context.
        """
        model, n = self.resolve(sampling.model), sampling.n or 1
        check(sampling, self.max_model_len)
        adapter = "" if model == self.model else model
        stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        outputs = []
        for prompt in prompts:
            room = self._room(prompt)
            for choice in range(n):
                own = seed_of(self.seed, sampling.seed, adapter, choice, prompt=prompt)
                if tools is not None and (called := tools.call(own)) is not None:
                    outputs.append(call(*called, min(sampling.max_tokens or room, room)))
                    continue
                wanted = sampling.max_tokens or (room if sampling.ignore_eos else natural_length(own))
                ends = sampling.max_tokens is None and not sampling.ignore_eos and wanted <= room
                outputs.append(write(own, min(wanted, room), ends=ends, stops=stops))
        choices = [prompt for prompt in prompts for _ in range(n)]
        return self.loop.submit(model, choices, outputs, (model, sampling.cache_salt))

    def encode(self, prompts: Sequence[TokenizedPrompt], model: str | None) -> Generation:
        """Compute the prompts without output text: a prefill and one token each; raises as `generate`."""
        name = self.resolve(model)
        for prompt in prompts:
            self._room(prompt)
        return self.loop.submit(name, prompts, [GeneratedText([""], "stop")] * len(prompts), (name, None))

    def _room(self, prompt: TokenizedPrompt) -> int:
        count = len(prompt.tokens)
        if not count:
            raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
        if count >= self.max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your "
                f"request has {count} input tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        return self.max_model_len - count


def call_id() -> str:
    """The id of a call of a tool."""
    return f"call_{uuid.uuid4().hex}"


def request_id(request: Request, prefix: str) -> str:
    """The id of the answer: ``prefix`` and the request's ``x-request-id``, or a random id."""
    return f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
