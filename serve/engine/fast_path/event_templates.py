"""The events of streamed answers of one kind, as templates taken from those that vLLM made of two answers.

Answers are of one kind if their events differ in nothing but the id, the time, the texts, the reason of the
end and the counts of tokens.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

_encode: Final = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
# An event begins with both, in this order.
_ID, _CREATED = b'"id":', b'"created":'
_REASON, _STOP = b'"finish_reason":', b'"stop_reason":'
_USAGE: Final = b'"usage":'
_EMPTY: Final = b'"delta":{'
_ROLE: Final = b'"role":'
_NUMBER: Final = re.compile(rb'"created":(\d+)')


class StreamUsage(NamedTuple):
    """The tokens of a prompt and its answer, and those that the prefix cache had and stored, if known."""

    prompt: int
    answer: int
    cached: int | None
    stored: int | None


def usage_of(counted: Any, answer: int) -> StreamUsage:
    """The usage by vLLM's state or output ``counted`` of a request whose answer has so many tokens."""
    cached, stored = counted.num_cached_tokens, counted.num_cache_creation_tokens
    return StreamUsage(len(counted.prompt_token_ids), answer, cached, stored)


class EventTemplates:
    """The templates of one kind. Each is a list of the pieces that stand around its values.

    ``first`` is an event before the first text, and ``usage`` one after the last text; each may be empty.
    ``text`` and ``last`` have a text, in the field that ``key`` begins. With ``skip_empty`` the field is left
    out of a last event without text. ``counts_stored`` is whether vLLM counted the tokens that the prefix
    cache stored, and ``stored`` whether the usage has them.
    """

    def __init__(
        self, key: bytes, *, skip_empty: bool, pieces: list[list[bytes]], counts_stored: bool, stored: bool
    ) -> None:
        self.key = key
        self.skip_empty = skip_empty
        self.pieces = pieces
        self.first, self.text, self.last, self.usage = pieces
        self.counts_stored = counts_stored
        self.stored = stored

    def fits(self, state: Any) -> bool:
        """Whether vLLM's ``state`` of a request has the counts that the recorded one had, and no others."""
        usage = usage_of(state, 0)
        return usage.cached is not None and (usage.stored is not None) is self.counts_stored

    def same(self, other: EventTemplates) -> bool:
        """Whether both write the same events."""
        return (
            self.pieces == other.pieces
            and self.stored is other.stored
            and self.counts_stored is other.counts_stored
        )


class AnswerEventTemplates:
    """The events of one answer. ``first`` begins it, ``before`` and ``after`` stand around each text."""

    def __init__(self, templates: EventTemplates, answer: bytes, created: bytes) -> None:
        self._templates = templates
        self._id_and_time = [answer, created]
        self.first = _join(templates.first, self._id_and_time)
        self.before = _join(templates.text[:-1], self._id_and_time) + templates.key
        self.after = templates.text[-1]

    def end(self, text: str, reason: str, stop: Any, usage: StreamUsage) -> bytes:
        """The last events, the first of which has the last ``text``.

        ``stop`` is the token or string that stopped the answer, if any.
        """
        templates = self._templates
        field = b"" if templates.skip_empty and not text else templates.key + _encode(text)
        last = _join(templates.last, [*self._id_and_time, field, _encode(reason), _encode(stop)])
        counts = _counts(usage, stored=templates.stored)
        return last + _join(templates.usage, [*self._id_and_time, counts]) + DONE


class RecordedAnswer:
    """The events that vLLM made for the answer with this id; the rest is as in :class:`EventTemplates`."""

    def __init__(self, answer: bytes, key: bytes, skip_empty: bool) -> None:
        self._answer = answer
        self._key = key
        self._skip_empty = skip_empty
        self._begin: list[bytes] = []
        # The first event with text, and that.
        self._event, self._text = b"", ""
        self._tokens = 0

    def add(self, output: Any, events: list[bytes]) -> bool:
        """Take the ``events`` of vLLM's next ``output``; false if its answer cannot be a template."""
        (choice,) = output.outputs
        self._tokens += len(choice.token_ids)
        if self._begin and output.finished:
            return True
        if choice.text and events and not self._event:
            self._event, self._text = events[-1], choice.text
        self._begin = self._begin or events
        return bool(self._begin) and not output.finished and output.num_cached_tokens is not None

    def templates(self, output: Any, events: list[bytes]) -> EventTemplates | None:
        """The templates, once the last ``output`` is added; ``None`` if its ``events`` have another form."""
        if not (self._event and 2 <= len(events) <= 3 and events[-1] == DONE):
            return None
        if (created := _NUMBER.search(self._event)) is None:
            return None
        # The one without text begins a chat.
        first = [each for each in self._begin if _ROLE in each]
        (choice,) = output.outputs
        same = [(_ID, self._answer), (_CREATED, created.group(1))]
        empty = self._skip_empty and not choice.text
        text = (_EMPTY, b"") if empty else (b"", self._key + _encode(choice.text))
        end = [(_REASON, _encode(choice.finish_reason)), (_STOP, _encode(choice.stop_reason))]
        usage = usage_of(output, self._tokens)
        stored = _counts(usage, stored=True) in events[1]
        counts = (_USAGE, _counts(usage, stored=stored))
        found = [
            _pieces(first[0], same) if first else [],
            _pieces(self._event, [*same, (b"", self._key + _encode(self._text))]),
            _pieces(events[0], [*same, text, *end]),
            _pieces(events[1], [*same, counts]) if len(events) == 3 else [],
        ]
        pieces = [each for each in found if each is not None]
        if len(pieces) < len(found):
            return None
        return EventTemplates(
            self._key, skip_empty=self._skip_empty, pieces=pieces,
            counts_stored=usage.stored is not None, stored=stored,
        )  # fmt: skip


class AnswerKind:
    """A kind of answers, and its templates once two of its answers in a row had the same.

    A field that vLLM fills anew for each answer, such as its latencies, is thereby never a part of them.
    """

    def __init__(self) -> None:
        self.templates: EventTemplates | None = None
        self._last: EventTemplates | None = None

    def record(self, templates: EventTemplates | None) -> None:
        """Take the ``templates`` of another answer, ``None`` if it has none."""
        if templates is not None and self._last is not None and templates.same(self._last):
            self.templates = templates
        self._last = templates


def _pieces(event: bytes, values: list[tuple[bytes, bytes]]) -> list[bytes] | None:
    """What stands around ``values`` in ``event``, with the keys; ``None`` where a value is not there."""
    # Quotes within strings are escaped, so a key is found nowhere else.
    pieces = []
    for key, value in values:
        before, found, event = event.partition(key + value)
        if not found:
            return None
        pieces.append(before + key)
    return [*pieces, event]


def _join(pieces: list[bytes], values: list[bytes]) -> bytes:
    """The pieces with the values between them, or nothing without pieces."""
    return b"".join(part for pair in zip(pieces, [*values, b""], strict=False) for part in pair)


def _counts(usage: StreamUsage, *, stored: bool) -> bytes:
    more = b',"created_cache_tokens":%d' % usage.stored if stored and usage.stored is not None else b""
    return (
        b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d%b}}'
        % (usage.prompt, usage.prompt + usage.answer, usage.answer, usage.cached or 0, more)
    )
