"""How an endpoint is asked: the route, the model's name, and what keeps answers at the wanted length."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sim.arrival import Arrival

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class RequestFormat:
    """What the requests of a replay have in common.

    ``model`` is what requests name, but for those to which the trace gives one of ``others``, or an adapter.
    With ``exact`` an answer has the wanted length whatever the model would say, which engines such as vLLM
    take.
    """

    model: str
    others: frozenset[str] = frozenset()
    chat: bool = False
    exact: bool = True

    @property
    def path(self) -> str:
        """The route."""
        return CHAT if self.chat else COMPLETIONS

    def name(self, arrival: Arrival) -> str:
        """The model or the adapter that a request names."""
        return arrival.adapter or (arrival.model if arrival.model in self.others else self.model)

    def body(self, name: str, prompt: str, output_tokens: int) -> bytes:
        """The request for ``output_tokens`` tokens of the model called ``name``."""
        body: dict[str, object] = {
            "model": name,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.exact:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        return _encode(body)
