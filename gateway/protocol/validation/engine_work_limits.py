"""Bounds of the fields that multiply an engine's work, beside those of a body's size and depth.

docs/request-limits.md has the table. Of which type a field is, is left to the engine, which refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import ITEMS, MEMBERS
from gateway.protocol.json_structure import depth_exceeds
from gateway.protocol.paths import COMPLETIONS
from gateway.protocol.validation.forwarded_fields import STEERING
from gateway.protocol.validation.regex_size import expanded_size
from policy.engine.grammar_bounds import MAX_OPENINGS, grammar_excess, openings, pattern_excess
from policy.errors import Refusal

MAX_N: Final = 8
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 4
MAX_STOP_SEQUENCES: Final = 16
MAX_STOP_BYTES: Final = 4096
MAX_TOKEN_IDS: Final = 64
MAX_BIASES: Final = 300
MAX_MIN_TOKENS: Final = 1_000_000
MAX_TOKENS: Final = 1 << 20
# Engines serialize integers of up to 64 bits.
MAX_INTEGER: Final = (1 << 31) - 1
# vLLM compares each pattern size with the end of the answer, in each step.
MAX_PATTERN: Final = 128
MAX_REPETITIONS: Final = 64
# The fields that are no prompts are short.
MAX_FIELD: Final = 64 * 1024
MAX_TOOLS: Final = 512
MAX_TOOLS_BYTES: Final = 1024 * 1024
MAX_SCHEMA_DEPTH: Final = 32
MAX_CHOICES: Final = 1000
MAX_REGEX: Final = 10_000
# Messages of a conversation, and inputs that are computed on their own.
MAX_MESSAGES: Final = 10_000
MAX_INPUTS: Final = 2048

# Of each route, the fields that are lists of what is computed on its own.
INPUTS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("documents",),
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("input",),
    "/v1/score": ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"),
    "/v1/rerank": ("documents",),
}

# What models read, which has other bounds or the body's alone. All other fields are short.
LONG_FIELDS: Final = frozenset(
    {
        "messages", "system", "instructions", "prompt", "suffix", "input", "previous_input_messages",
        "prediction", "tools", "functions", "mcp_servers", "tokens", "mm_payload", "query", "queries",
        "documents", "items", "text_1", "text_2", "data_1", "data_2", "input_1", "input_2", "instruction",
    }
)  # fmt: skip
_NUMBER_BYTES: Final = 32
_OPEN: Final = ord("[")
_WORDS = (b"null", b"true", b"false")
_ENCODINGS = (b"null", b'"float"', b'"base64"')
_SPACE: Final = ord(" ")

Check = Callable[[str, Raw], None]


def too_many(name: str, most: int, count: int, what: str) -> Refused:
    message = f"{name} takes at most {most} {what}, got {count}."
    return Refused(Refusal.BAD_REQUEST, message, param=name)


def check_size(name: str, value: Raw, most: int = MAX_FIELD) -> None:
    """Refuse a ``value`` of over ``most`` bytes of JSON."""
    size = len(memoryview(value))
    if size > most:
        raise too_many(name, most, size, "bytes")


def check_number(name: str, value: Raw, most: int) -> None:
    """Refuse a number over ``most``, and what engines could read as one."""
    text = bytes(memoryview(value)[: _NUMBER_BYTES + 1])
    if text in _WORDS:
        return
    try:
        number = float(text) if len(text) <= _NUMBER_BYTES else most + 1.0
    except ValueError:
        raise Refused(Refusal.BAD_REQUEST, f"{name} must be a number.", param=name) from None
    if not -MAX_INTEGER <= number <= most:
        shown = text[:_NUMBER_BYTES].decode()
        bound = f"at least {-MAX_INTEGER}" if number < 0 else f"at most {most}"
        raise Refused(Refusal.BAD_REQUEST, f"{name} must be {bound}, got {shown}.", param=name)


def first_item(raw: bytes | memoryview, begin: int = 0) -> int:
    """The first byte of the first item of the JSON list that begins there; its bracket if it is empty."""
    at = begin + 1
    while (byte := raw[at]) <= _SPACE:
        at += 1
    return byte


def inputs_of(value: Raw) -> int:
    """How many texts, objects or lists of token ids ``value`` is; a list of numbers is one."""
    view = memoryview(value)
    is_list = view[0] == _OPEN and first_item(view) in b'["{'
    return len(ITEMS.decode(value)) if is_list else 1


def check_tools(items: list[Raw], name: str = "tools") -> None:
    """Refuse too many tools, and too large ones; ``name`` is that of their list."""
    if len(items) > MAX_TOOLS:
        raise too_many(name, MAX_TOOLS, len(items), "tools")
    for at, item in enumerate(items):
        check_size(f"{name}.{at}", item)
        # The parameters of a tool are a schema. A text that is shorter than the bound cannot exceed it.
        view = memoryview(item)
        if len(view) > MAX_OPENINGS and (opened := openings(str(view, "utf-8", "replace"))) > MAX_OPENINGS:
            raise too_many(f"{name}.{at}", MAX_OPENINGS, opened, "opening parentheses and brackets")


def _number(most: int) -> Check:
    return lambda name, value: check_number(name, value, most)


def _token_ids(most: int) -> Check:
    count = _list(most, "tokens")

    def check(name: str, value: Raw) -> None:
        count(name, value)
        if memoryview(value)[0] == _OPEN:
            for token_id in ITEMS.decode(value):
                check_number(name, token_id, MAX_INTEGER)

    return check


def _repetitions(name: str, value: Raw) -> None:
    check_size(name, value)
    if memoryview(value)[0] == ord("{"):
        for member, number in MEMBERS.decode(value).items():
            most = MAX_REPETITIONS if member == "min_count" else MAX_PATTERN
            check_number(f"{name}.{member}", number, most)


def _list(most: int, what: str) -> Check:
    def check(name: str, value: Raw) -> None:
        check_size(name, value, MAX_STOP_BYTES)
        if memoryview(value)[0] == _OPEN and (count := len(ITEMS.decode(value))) > most:
            raise too_many(name, most, count, what)

    return check


def _biases(name: str, value: Raw) -> None:
    check_size(name, value)
    if memoryview(value)[0] == ord("{") and (count := len(MEMBERS.decode(value))) > MAX_BIASES:
        raise too_many(name, MAX_BIASES, count, "tokens")


def _ids(name: str, value: Raw) -> None:
    view = memoryview(value)
    # Each takes two bytes at least.
    if view[0] == _OPEN and len(view) > 2 * MAX_TOKENS:
        raise too_many(name, 2 * MAX_TOKENS, len(view), "bytes")


def _schema(name: str, value: Raw) -> None:
    """What an engine compiles to a grammar."""
    check_size(name, value)
    raw = bytes(value)
    if depth_exceeds(raw, MAX_SCHEMA_DEPTH):
        message = f"{name} nests deeper than {MAX_SCHEMA_DEPTH} levels."
        raise Refused(Refusal.BAD_REQUEST, message, param=name)
    choices = 0
    for key, found in _members(name, msgspec.json.decode(raw)):
        if key in _CHOICES and isinstance(found, list):
            choices += len(found)
        elif key in _REGEXES and isinstance(found, str):
            _check_pattern(name, found)
        elif key == _NAMED_BY_PATTERN and isinstance(found, dict):
            for pattern in found:
                _check_pattern(name, pattern)
        elif key in _GRAMMARS and isinstance(found, str) and (excess := grammar_excess(found, f"in {name}")):
            raise _excessive(name, excess)
    if choices > MAX_CHOICES:
        raise too_many(name, MAX_CHOICES, choices, "values of enumerations")


def _check_pattern(name: str, pattern: str) -> None:
    """Refuse a pattern within ``name`` that is long, as it is or with its repetitions written out."""
    if excess := pattern_excess(pattern, f"in {name}"):
        raise _excessive(name, excess)
    if (size := expanded_size(pattern)) > MAX_REGEX:
        message = f"{name} takes regular expressions of {MAX_REGEX} characters written out, got {size}."
        raise Refused(Refusal.BAD_REQUEST, message, param=name)


def _excessive(name: str, excess: str) -> Refused:
    """For an excess as :mod:`policy.engine.grammar_bounds` words it: "a pattern ..."."""
    return Refused(Refusal.BAD_REQUEST, f"A{excess[1:]}.", param=name)


_CHOICES: Final = frozenset({"enum", "choice", "guided_choice"})
_REGEXES: Final = frozenset(
    {"pattern", "regex", "guided_regex", "whitespace_pattern", "guided_whitespace_pattern"}
)
_NAMED_BY_PATTERN: Final = "patternProperties"
_GRAMMARS: Final = frozenset({"grammar", "guided_grammar"})
# Engines take these as JSON in a text, too.
_JSON: Final = frozenset({"json", "guided_json", "structural_tag"})


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each member of each object within ``value``, which itself is called ``name``."""
    waiting: list[tuple[str, Any]] = [(name, value)]
    while waiting:
        key, found = waiting.pop()
        yield key, found
        if isinstance(found, str) and key in _JSON:
            try:
                found = msgspec.json.decode(found)
            except (ValueError, RecursionError):
                continue
        if isinstance(found, dict):
            waiting.extend(found.items())
        elif isinstance(found, list):
            waiting.extend([("", each) for each in found])


def wants_prompt_logprobs(fields: dict[str, Raw], path: str) -> bool:
    """Whether a body asks for the log probabilities of its prompt too: ``echo``, and those of the answer."""
    wanted = counts_logprobs(fields, path) or any(
        name in fields and _is_set(fields[name]) for name in ("logprobs", "logprob_token_ids")
    )
    return wanted and "echo" in fields and _is_set(fields["echo"])


def counts_logprobs(fields: dict[str, Raw], path: str) -> bool:
    """Whether ``logprobs`` is a number and given, false too: engines read that as 0 alternatives."""
    return path == COMPLETIONS and "logprobs" in fields and not _is_null(fields["logprobs"])


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:5]) == b"null"


def _is_set(value: Raw) -> bool:
    """Whether it is neither null nor false, which clients that write out defaults send."""
    return bytes(memoryview(value)[:8]) not in (b"null", b"false")


def check_schemas(fields: dict[str, Raw]) -> None:
    """Refuse ``fields`` of :data:`SCHEMAS` that are too large together."""
    total = 0
    for name, value in fields.items():
        check_size(name, value)
        total += len(memoryview(value))
        if total > MAX_FIELD:
            raise too_many(name, MAX_FIELD, total, "bytes together with the other schemas")


def refuse_steering(name: str, value: Raw) -> None:
    """Refuse a field that steers the server, unless its value steers nothing."""
    if _is_set(value):
        raise _steers(name)


def _refuse_number(name: str, value: Raw) -> None:
    """As :func:`refuse_steering`, of a number that steers as 0 too, as which engines read false."""
    if not _is_null(value):
        raise _steers(name)


def _steers(name: str) -> Refused:
    return Refused(Refusal.UNSUPPORTED, f"{name} is not accepted by this server.", param=name)


def _template_arguments(name: str, value: Raw) -> None:
    check_size(name, value)
    try:
        arguments = msgspec.json.decode(value, type=dict[str, Raw] | None) or {}
    except ValueError:  # also for names that are no UTF-8
        raise Refused(Refusal.BAD_REQUEST, f"{name} must be an object.", param=name) from None
    for argument in STEERING:
        if argument in arguments:
            refuse_steering(f"{name}.{argument}", arguments[argument])


def _structured_outputs(name: str, value: Raw) -> None:
    # vLLM reads it before it validates it, and fails on other types, as if the replica were at fault.
    if memoryview(value)[0] not in b"{n":
        raise Refused(Refusal.BAD_REQUEST, f"{name} must be an object.", param=name)
    _schema(name, value)


def _encoding(name: str, value: Raw) -> None:
    # Of other encodings the answer is no JSON, or has no usage.
    if bytes(memoryview(value)[:16]) not in _ENCODINGS:
        raise Refused(Refusal.UNSUPPORTED, f"{name} must be float or base64.", param=name)


def _previous_response(name: str, value: Raw) -> None:
    if not _is_null(value):
        message = f"{name} is not supported: send the whole conversation as input."
        raise Refused(Refusal.UNSUPPORTED, message, param=name)


SCHEMAS: Final = (
    "response_format", "text", "output_config", "output_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern",
)  # fmt: skip
"""What engines compile to grammars. They are walked in one turn: in sum they take as much as one."""

CHECKS: dict[str, Check] = {
    **dict.fromkeys(STEERING, refuse_steering),
    "prompt_logprobs": _refuse_number,
    **dict.fromkeys(("logprobs", "top_logprobs"), _number(MAX_LOGPROBS)),
    "best_of": _number(MAX_N),
    "min_tokens": _number(MAX_MIN_TOKENS),
    "truncate_prompt_tokens": _number(MAX_TOKENS),
    "stop": _list(MAX_STOPS, "sequences"),
    "stop_sequences": _list(MAX_STOP_SEQUENCES, "sequences"),
    "bad_words": _list(MAX_TOKEN_IDS, "words"),
    **dict.fromkeys(
        ("top_k", "thinking_token_budget", "stream_interval", "routed_experts_prompt_start", "dimensions"),
        _number(MAX_INTEGER),
    ),
    "repetition_detection": _repetitions,
    "stop_token_ids": _token_ids(MAX_TOKEN_IDS),
    "logprob_token_ids": _token_ids(MAX_LOGPROBS),
    "include": _list(MAX_STOP_SEQUENCES, "fields"),
    "logit_bias": _biases,
    **dict.fromkeys(SCHEMAS, _schema),
    "structured_outputs": _structured_outputs,
    "chat_template_kwargs": _template_arguments,
    "previous_response_id": _previous_response,
    "encoding_format": _encoding,
    "tokens": _ids,
}  # fmt: skip
"""By field, what is checked of it where it is present."""
