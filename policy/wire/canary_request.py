"""Canary requests: the smallest real requests, to check a replica at its start and after a fault."""

from __future__ import annotations

from policy.types import Runner

# A pooling model embeds or scores, and which of the two only its engine knows. vLLM compiles a kernel for the
# first log probabilities, for up to a minute on a busy machine, and meanwhile makes no step for others.
CANARIES: dict[Runner, tuple[tuple[str, dict[str, object]], ...]] = {
    Runner.GENERATE: (
        ("/v1/completions", {"prompt": "1", "max_tokens": 1, "temperature": 0, "logprobs": 0}),
    ),
    Runner.POOLING: (("/v1/embeddings", {"input": "1"}), ("/v1/score", {"text_1": "1", "text_2": "1"})),
}
