"""The service that all endpoints use: it turns request parameters into a generation in the step loop."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from policy.types import Runner
from serve.engine.sim.http import ApiError
from serve.engine.sim.metrics import Metrics
from serve.engine.sim.step_loop import Generation, StepLoop
from serve.engine.sim.text import Output, Prompt, natural_length, seed_of, write


@dataclass(slots=True, eq=False)
class Service:
    """One engine for its endpoints; ``clock`` gives Unix seconds for ``created`` fields."""

    model: str
    adapters: dict[str, str]
    runner: Runner
    max_model_len: int
    seed: int
    loop: StepLoop
    metrics: Metrics
    clock: Callable[[], float]
    created: int = field(init=False)
    _names: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self.created = self.now()

    def now(self) -> int:
        """Whole Unix seconds, for ``created``."""
        return int(self.clock())

    def resolve(self, model: str | None) -> str:
        """The adapter that ``model`` names, empty for the base; raises 404 for any other name."""
        if model is None or model == self.model:
            return ""
        if model in self.adapters:
            return model
        raise ApiError(404, f"The model `{model}` does not exist.", "model")

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        adapter: str,
        seed: int | None,
        max_tokens: int | None,
        n: int = 1,
        stops: Sequence[str] = (),
        ignore_eos: bool = False,
        salt: str | None = None,
    ) -> Generation:
        """Start ``n`` choices of each prompt; choice i of prompt j has index ``j n + i``.

        With ``max_tokens`` an answer has exactly that many tokens unless a stop sequence ends it. Without it
        the length is drawn from the seed, or the answer fills the context with ``ignore_eos``. Raises a 400
        when a prompt leaves no room in the context.
        """
        outputs = []
        for prompt in prompts:
            room = self._room(prompt)
            for choice in range(n):
                own = seed_of(self.seed, seed, adapter, choice, prompt=prompt)
                wanted = max_tokens or (room if ignore_eos else natural_length(own))
                ends = max_tokens is None and not ignore_eos and wanted <= room
                outputs.append(write(own, min(wanted, room), ends=ends, stops=stops))
        return self._submit([prompt for prompt in prompts for _ in range(n)], outputs, (adapter, salt))

    def encode(self, prompts: Sequence[Prompt], *, adapter: str) -> Generation:
        """Compute the prompts without output text: a prefill and one token each."""
        for prompt in prompts:
            self._room(prompt)
        return self._submit(prompts, [Output([""], "stop")] * len(prompts), (adapter, None))

    def abort(self, generation: Generation) -> None:
        """Abort ``generation``; no effect if it has ended."""
        self.loop.abort(generation)

    def _room(self, prompt: Prompt) -> int:
        count = len(prompt.tokens)
        if count >= self.max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your "
                f"request has {count} input tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        return self.max_model_len - count

    def _submit(
        self, prompts: Sequence[Prompt], outputs: Sequence[Output], salt: tuple[str, str | None]
    ) -> Generation:
        generation = Generation(str(next(self._names)), prompts, outputs)
        self.loop.submit(generation, salt)
        return generation


def request_id(request: Request, prefix: str) -> str:
    """The id of the answer: ``prefix`` and the request's ``x-request-id``, or a random id."""
    return f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
