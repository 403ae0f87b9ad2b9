"""Media come from the request itself, or from hosts that the deployment names."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.protocol.body import BodyRules
from gateway.protocol.errors import Refused
from tests.gateway.protocol.accepted_body import accepted_body

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RULES = BodyRules(media_hosts=frozenset({"img.example"}))
DATA = "data:image/png;base64,AAAA"


def openai(url: Any, kind: str = "image_url") -> list[Any]:
    return [{"role": "user", "content": ["look", {"type": kind, kind: {"url": url}}]}]


def anthropic(url: str) -> list[Any]:
    image = {"type": "image", "source": {"type": "url", "url": url}}
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]}]


# Path, field, and what holds a URL.
PLACES: list[tuple[str, str, Any]] = [
    (CHAT, "messages", openai),
    (CHAT, "messages", lambda url: openai(url, "video_url")),
    (CHAT, "messages", lambda url: openai(url, "audio_url")),
    (CHAT, "messages", lambda url: [{"content": [{"image_url": url}]}]),
    (CHAT, "messages", lambda url: [{"content": {"image_url": url}}]),
    (MESSAGES, "messages", anthropic),
    (MESSAGES, "messages", lambda url: [{"content": [{"source": {"content": openai(url)}}]}]),
    ("/v1/messages/count_tokens", "messages", anthropic),
    (RESPONSES, "input", lambda url: [{"content": [{"type": "input_image", "image_url": url}]}]),
    (RESPONSES, "input", lambda url: [{"content": [{"type": "input_file", "file_url": url}]}]),
    (RESPONSES, "input", lambda url: [{"type": "function_call_output", "output": [{"image_url": url}]}]),
    (RESPONSES, "input", lambda url: [{"output": {"image_url": url}}]),
    ("/v1/embeddings", "messages", openai),
    ("/v1/embeddings", "input", lambda url: [openai(url)]),
    ("/v1/score", "data_1", lambda url: {"content": [{"image_url": {"url": url}}]}),
    ("/v1/rerank", "documents", lambda url: ["a", {"content": [{"image_url": {"url": url}}]}]),
    ("/v1/tokenize", "messages", openai),
]
GOOD = [DATA, "Data:,", "https://img.example/a.png?x=[1]#~", "HTTP://IMG.example:80", "http://img.example?x"]
BAD = [
    "https://other.example/a", "https://img.example.other.example/", "https://img.example@other.example/",
    "https://other.example#@img.example/", "https://img.example\\@other.example/", "https://img.example:x/",
    "http://169.254.169.254/latest", "http://[::1]/", "http://localhost/", "//img.example/a",
    "file:///etc/passwd",
    "file://img.example/etc/passwd", "ftp://img.example/a", "", " data:,",
    "https://img.example/\n", "a" * 9000,
    "https://img.example /", "javascript:0", "gopher://img.example", "https:img.example", 7, ["data:,"],
]  # fmt: skip


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize(("path", "field", "place"), PLACES)
def test_urls_are_refused_unless_their_host_is_allowed(
    path: str, field: str, place: Any, padding: int
) -> None:
    def accept(url: Any) -> int:
        padded = [{"role": "user", "content": "a" * padding}] if padding else []
        body = {"model": "m", field: padded + place(url) if isinstance(place(url), list) else place(url)}
        return accepted_body(body, path, RULES).body.media

    assert [accept(url) for url in GOOD] == [1] * len(GOOD)
    for url in BAD:
        with pytest.raises(Refused, match=rf"^{field}: .*(URL|from)") as refused:
            accept(url)
        assert (refused.value.status, refused.value.param) == (400, field)


def test_an_escaped_url_is_the_url_that_an_engine_reads() -> None:
    part = b'{"\\u0069mage_url":{"ur\\u006c":"\\u0068ttps://%b/"}}'
    for padding in (b"", b"a" * 300_000):
        raw = b'{"model":"m","messages":[{"content":[' + part + b'],"role":"%b"}]}' % padding
        assert accepted_body(raw.replace(b"%b", b"img.example"), rules=RULES).body.media == 1
        with pytest.raises(Refused, match="other"):
            accepted_body(raw.replace(b"%b", b"other"), rules=RULES)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "search_result", "source": "https://other.example", "content": [{"text": "a"}]},
        {"type": "tool_use", "input": {"image_url": "https://other.example", "uuid": "a"}},
        {"type": "text", "text": "https://other.example", "uuid": "a"},
        {"type": "document", "source": {"type": "text", "data": "a"}},
        {"type": "image_url", "image_url": None},
        {"type": "tool_use", "input": {"type": "prompt_embeds", "data": "a"}},
    ],
)
def test_what_is_no_medium_passes(part: dict[str, Any]) -> None:
    assert accepted_body({"model": "m", "messages": [{"content": [part]}]}).body.media == 0


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"image_embeds": "%"}, "image_embeds is not accepted"),
        ({"type": "prompt_embeds", "prompt_embeds": {"data": "%"}}, "prompt_embeds is not accepted"),
        ({"type": "prompt_embeds", "data": "%"}, "prompt_embeds is not accepted"),
        ({"image_url": {"url": "data:%"}, "uuid": "a"}, "uuid is not accepted"),
        ({"image_url": None, "uuid": "%"}, "uuid is not accepted"),
        ({"content": [{"content": [{"content": [{"content": [{"a": "%"}]}]}]}]}, "deeper than 4 levels"),
    ],
)
def test_tensors_names_and_deep_parts_are_refused(part: dict[str, Any], message: str, size: int) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(each) for name, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        return value.replace("%", "a" * size) if isinstance(value, str) else value

    with pytest.raises(Refused, match=message):
        accepted_body({"model": "m", "messages": [{"content": [filled(part)]}]}, rules=RULES)


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize("escaped", [1, 13])
def test_an_escaped_type_is_the_type_that_an_engine_reads(escaped: int, padding: int) -> None:
    name = "prompt_embeds"
    kind = "".join([f"\\u{ord(letter):04x}" for letter in name[:escaped]]) + name[escaped:]
    part = f'{{"da\\u0074a":"{"a" * padding}","type":"{kind}"}}'
    raw = f'{{"model":"m","messages":[{{"content":[{part}],"role":"user"}}]}}'.encode()
    with pytest.raises(Refused, match="prompt_embeds is not accepted"):
        accepted_body(raw)


@pytest.mark.parametrize("held", ["url", "data", "file_data"])
def test_media_are_bounded_by_count_and_bytes(held: str) -> None:
    name = {"url": "image_url", "data": "input_audio", "file_data": "file"}[held]

    def messages(count: int, size: int) -> dict[str, Any]:
        part = {name: {held: "data:" + "a" * size, "format": "wav"}}
        return {"model": "m", "messages": [{"content": [part] * count}]}

    assert accepted_body(messages(128, 10)).body.media == 128
    assert accepted_body(messages(1, 10_000_000)).body.media == 1
    for count, size, message in (
        (129, 10, "at most 128 images"),
        (129, 5000, "128"),
        (1, 10_600_000, "bytes"),
    ):
        with pytest.raises(Refused, match=message):
            accepted_body(messages(count, size))
