"""The session of a request: by the id that its client sends, else by the begin of its conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

import msgspec
import xxhash
from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.body import RequestBody
from gateway.protocol.json_decoders import METADATA, USER

# Constants are read faster than names of other modules, in machine code.
ABSENT: Final = json_decoders.ABSENT
# The id of one conversation: what is sent under it belongs together, whatever it is.
CONVERSATION_HEADERS: Final = (
    b"x-session-id",  # ours, vLLM's, OpenCode's
    b"x-session-affinity",  # OpenCode, pi
    b"x-opencode-session",
    b"x-litellm-session-id",  # OpenHands
    b"thread-id",  # Codex
)
# The id of a run of an agent, whose subagents send it too.
RUN_HEADERS: Final = (
    b"x-claude-code-session-id",
    b"session-id",  # Codex
    b"session_id",  # Codex until 2026
    b"conversation_id",
)
SESSION_HEADERS: Final = (*CONVERSATION_HEADERS, *RUN_HEADERS)
_NAMES: Final = frozenset(SESSION_HEADERS)

# Longer ids, and those with other characters, are not taken for one.
_ID: Final = re.compile(rb"[\x21-\x7e]{1,256}")
MAX_METADATA: Final = 4096
_SESSION: Final = "_session_"


class SessionScope(Enum):
    """What an id stands for: one conversation, an agent with its subagents, or an application."""

    CONVERSATION = 0
    RUN = 1
    APPLICATION = 2


class ClientSession(NamedTuple):
    """An id that a client sent."""

    id: bytes
    scope: SessionScope

    @property
    def of_one_user(self) -> bool:
        return self.scope is not SessionScope.APPLICATION


def given_session(headers: Mapping[bytes, bytes], body: RequestBody) -> ClientSession | None:
    """The id of a session, from the most specific header or field that has a valid one.

    ``user`` and ``safety_identifier`` name a person, who has several conversations: they are no sessions.
    """
    if not _NAMES.isdisjoint(headers):
        for name in CONVERSATION_HEADERS:
            if (value := headers.get(name)) is not None and _ID.fullmatch(value):
                return ClientSession(value, SessionScope.CONVERSATION)
        for name in RUN_HEADERS:
            if (value := headers.get(name)) is not None and _ID.fullmatch(value):
                return ClientSession(value, SessionScope.RUN)
    if body.metadata is not ABSENT and (value := _of_metadata(body.metadata)) is not None:
        return ClientSession(value, SessionScope.RUN)
    if body.prompt_cache_key is not ABSENT and (value := _text(body.prompt_cache_key)) is not None:
        return ClientSession(value, SessionScope.APPLICATION)
    return None


def session_key(tenant: int, given: ClientSession | None, opening: int) -> int:
    """The session of a request, 0 without one; different for different tenants.

    ``opening`` is the hash of the conversation's begin, 0 if it is none. A run's subagents have conversations
    of their own, which share little of its prompt: each is a session, so that they need not queue for one
    replica. The id keeps apart what begins equally, as the same task in several runs.
    """
    if given is None:
        return opening
    seed = tenant if given.scope is SessionScope.CONVERSATION else tenant ^ opening
    return xxhash.xxh3_64_intdigest(given.id, seed=seed)


def _of_metadata(raw: Raw) -> bytes | None:
    """Anthropic's ``metadata.user_id`` as Claude Code fills it, or a ``metadata.session_id``.

    The former is ``user_HASH_account_UUID_session_UUID``, or since 2.1.78 a JSON object as text.
    """
    if len(memoryview(raw)) > MAX_METADATA:
        return None
    try:
        metadata = METADATA.decode(raw)
        if metadata is None:
            return None
        user = metadata.user_id
        if isinstance(user, str):
            if user.startswith("{"):
                return _valid(USER.decode(user).session_id)
            if (at := user.rfind(_SESSION)) >= 0:
                return _valid(user[at + len(_SESSION) :])
    except ValueError:
        return None
    return _valid(metadata.session_id)


def _text(raw: Raw) -> bytes | None:
    if len(memoryview(raw)) > MAX_METADATA:
        return None
    try:
        return _valid(msgspec.json.decode(raw))
    except ValueError:
        return None


def _valid(value: object) -> bytes | None:
    if not isinstance(value, str):
        return None
    written = value.encode(errors="replace")
    return written if _ID.fullmatch(written) else None
