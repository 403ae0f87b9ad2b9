"""Which permissions a request needs."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.protocol.paths import ROUTES
from gateway.protocol.restricted_features import used_features
from policy.config.tenancy import Feature
from tests.gateway.protocol.accepted_body import accepted_body

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ADDED_TOOL = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "run"}}}
# Engines take its data in base64, whatever the type.
TEXT_IMAGE = {"type": "text", "media_type": "image/png", "data": "AA=="}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("path", "fields", "used"),
    [
        (CHAT, {"temperature": 0, "stop": "a", "tools": [], "logprobs": False, "response_format": None}, ""),
        (CHAT, {"response_format": {"type": "text"}, "top_logprobs": None}, ""),
        (CHAT, {"tools": [{}]}, "tools"),
        (CHAT, {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": 0}, "logprobs"),
        ("/v1/completions", {"logprobs": False}, "logprobs"),
        ("/v1/completions", {"logprobs": None}, ""),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "logprobs"),
        (RESPONSES, {"include": ["x"], "text": {"format": {"type": "text"}}}, ""),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (MESSAGES, {"output_config": {"effort": "low"}}, ""),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "structured_outputs"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}], "tools": [{}]}, "images tools"),
        (MESSAGES, {"messages": [{"role": "system", "content": [ADDED_TOOL]}]}, "tools"),
        (CHAT, {"messages": [{"role": "developer", "content": "a", "tools": [{}]}]}, "tools"),
        (CHAT, {"messages": [{"role": "developer", "content": "a", "tools": None}]}, ""),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": TEXT_IMAGE}]}]},
            "images",
        ),
        ("/v1/embeddings", {"input": "a"}, "embeddings"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "embeddings"),
    ],
)
@pytest.mark.parametrize("padding", [0, 300_000])
def test_features_are_those_that_a_request_asks_for(
    path: str, fields: dict[str, Any], used: str, padding: int
) -> None:
    accepted = accepted_body({"model": "m", "filler": "a" * padding, **fields}, path)
    assert used_features(accepted.body, ROUTES[path]) == {Feature(name) for name in used.split()}
