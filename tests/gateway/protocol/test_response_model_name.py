"""An answer names the model as the client does, whatever the server calls it, and nothing else changes."""

from __future__ import annotations

import json

import pytest

from gateway.protocol.response_model_name import ModelNameRewrite

OURS, THEIRS = "m", "org/Model-1é"


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def spaced(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize("encode", [compact, spaced])
@pytest.mark.parametrize("quoted", [THEIRS, f'"model":"{THEIRS}"', f'{{"model": "{THEIRS}"}}'])
def test_only_the_models_name_changes_however_the_answer_is_cut(encode, quoted: str) -> None:  # type: ignore[no-untyped-def]
    def answer(name: str) -> dict[str, object]:
        return {"model": name, "text": quoted, "response": {"id": 1, "model": name}, "models": THEIRS}

    came, expected = encode(answer(THEIRS)), answer(OURS)
    assert json.loads(ModelNameRewrite(THEIRS, OURS).whole(came)) == expected
    for cut in range(len(came)):
        rewrite = ModelNameRewrite(THEIRS, OURS)
        parts = rewrite.feed(came[:cut], complete=False), rewrite.feed(came[cut:], complete=True)
        assert json.loads(b"".join(parts)) == expected
