"""One trace of a streamed chat from its client through the gateway into a real vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.conftest import CHAT
from tests.e2e.stack import ROOT, Stack, eventually, running
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# How much the gateway's times may differ from the client's.
APART_S = 0.002
ROUNDS = 5


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Iterator[Stack]:
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu.yaml").read_text())
    document["tracing"] = {"endpoint": receiver.url, "sample_ratio": 0}
    with running(document, "--no-ray") as stack:
        yield stack


def chat(stack: Stack, sampled: bool) -> tuple[float, float, float]:
    """Unix times at the client of a streamed chat: sent, first token, end."""
    body = {
        "model": CHAT, "messages": [{"role": "user", "content": "Count to ten."}], "stream": True,
        "max_tokens": 16, "temperature": 0,
    }  # fmt: skip
    request = stack.http.build_request(
        "POST", f"{stack.base_url}/chat/completions", json=body,
        headers={"traceparent": f"00-{TRACE}-{SPAN}-0{int(sampled)}"},
    )  # fmt: skip
    sent = time.time()
    response = stack.http.send(request, stream=True)
    chunks = response.iter_raw()
    assert b'"delta"' in next(chunks)
    first = time.time()
    assert b"[DONE]" in b"".join(chunks)
    return sent, first, time.time()


def joined(receiver: OtlpReceiver) -> list[ReceivedSpan]:
    """The spans of the client's trace; the canary of a starting engine has one of its own."""
    return sorted((span for span in receiver.spans if span.trace_id == TRACE), key=lambda span: span.begin)


def test_a_streamed_chat_is_one_trace_with_the_clients_times(traced: Stack, receiver: OtlpReceiver) -> None:
    chat(traced, sampled=False)
    times = [chat(traced, sampled=True) for _ in range(ROUNDS)]
    eventually(lambda: len(joined(receiver)) == 6 * ROUNDS, 60, lambda: str(joined(receiver)))
    spans = joined(receiver)
    servers = [span for span in spans if span.name.startswith("POST")]
    upstreams = {span.span_id: span for span in spans if span.name == f"chat {CHAT}"}
    engines = [span for span in spans if span.name == "llm_request"]
    assert [span.parent_id for span in servers] == [SPAN] * ROUNDS  # the one that was not sampled is missing
    assert {span.parent_id for span in upstreams.values()} == {span.span_id for span in servers}
    assert {span.parent_id for span in engines} == upstreams.keys()
    assert {span.service for span in engines} == {"vllm"}
    for engine in engines:
        upstream = upstreams[engine.parent_id]
        assert upstream.begin <= engine.begin <= engine.end <= upstream.end + APART_S
    for place, which in enumerate(("sent", "first token", "end")):
        at = [(span.begin, span.events["first_token"], span.end)[place] for span in servers]
        apart = [abs(mine - client[place]) for mine, client in zip(at, times, strict=True)]
        # Another process may have the core in some rounds.
        assert min(apart) < APART_S, (which, apart)
