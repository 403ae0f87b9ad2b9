"""Which request bodies are refused, and which parameter the refusal names."""

from __future__ import annotations

import pytest

from gateway.protocol.body import read
from gateway.protocol.errors import Refused


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, None),
        (b"{", None, None),
        (b"[]", None, None),
        (b'"x"', None, None),
        (b'{"model":"alpha"} x', None, None),
        (b"{}", "model", None),
        (b'{"model":null}', "model", None),
        (b'{"model":7}', "model", None),
        (b'{"model":"alpha","stream":"yes"}', "stream", None),
        (b'{"model":"alpha","n":"2"}', "n", None),
        (b'{"model":"alpha","n":9}', "n", None),
        (b'{"model":"alpha","n":0}', "n", None),
        (b'{"model":"alpha","stop":["a","b","c","d","e"]}', "stop", None),
        (b'{"model":"alpha","priority":1}', "priority", "unsupported"),
        (b'{"model":"alpha","chat_template":"x"}', "chat_template", "unsupported"),
        (
            b'{"model":"alpha","chat_template_kwargs":{"chat_template":"x"}}',
            "chat_template_kwargs.chat_template",
            "unsupported",
        ),
        (b'{"model":"alpha","chat_template_kwargs":7}', "chat_template_kwargs", None),
        (b'{"model":"alpha","chat_template_kwargs":{"\xff":1}}', "chat_template_kwargs", None),
        (b'{"model":"alpha","previous_response_id":"r"}', "previous_response_id", "unsupported"),
        (b'{"model":"alpha","background":true}', "background", "unsupported"),
        (b'{"model":"alpha","x":' + b"[" * 70 + b"]" * 70 + b"}", None, None),
        (b'{"model":"alpha","x":' + b"[" * 5000 + b"]" * 5000 + b"}", None, None),
    ],
)
def test_a_bad_body_is_refused_with_its_parameter(body: bytes, param: str | None, code: str | None) -> None:
    with pytest.raises(Refused) as refused:
        read(body)
    error = refused.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert len(error.body()) < 4096


def test_defaults_that_clients_write_out_pass() -> None:
    written = b'{"model":"a","prompt_logprobs":null,"use_beam_search":false,"background":false,"stop":null}'
    assert read(written).model == "a"
