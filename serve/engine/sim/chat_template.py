"""Conversations as prompts: the messages of each API, with calls and results of tools, as vLLM reads them.

What vLLM accepts for a text model is accepted: any role in a chat, earlier reasoning (which templates drop),
calls and results of tools; Claude Code's attribution header is dropped. What it refuses is refused: media,
and parts and items of other types. Source: vLLM's ``renderers/chat_utils.py``,
``entrypoints/anthropic/serving.py`` and ``entrypoints/openai/responses/utils.py`` (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.pseudo_tokenizer import TokenizedPrompt

Content = str | list[dict[str, Any]] | None

# Types of content parts that are text, and the field that holds it.
_CHAT = {"text": "text", "refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}
_INPUT, _OUTPUT = {"input_text": "text"}, {"output_text": "text"}
# Types that vLLM knows and a text model does not take.
_MEDIA = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
    }
)
_TOOL_CHANGES = frozenset({"tool_addition", "tool_removal"})
# Claude Code's first system block, with a value that changes: vLLM drops it, for its prefix cache.
_ATTRIBUTION = "x-anthropic-billing-header"


class FunctionCall(msgspec.Struct, frozen=True):
    """A function and its arguments, as the model wrote them."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool in an assistant's message."""

    id: str
    function: FunctionCall
    type: Literal["function"]


class FunctionCallItem(msgspec.Struct, frozen=True):
    """A call in the input of a response."""

    call_id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a chat; the role is any text. A content may be missing."""

    role: str
    content: Content | UnsetType = UNSET
    tool_calls: list[ToolCall] | None = None


class ConversationTurn(NamedTuple):
    """One turn of a conversation as text."""

    role: str
    text: str


class AnthropicTool(msgspec.Struct, frozen=True):
    """A tool; ``input_schema`` is required, as in Anthropic's API."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool of the request."""

    name: str


class DefinedTool(msgspec.Struct, frozen=True, tag_field="type", tag="tool_definition"):
    """A tool that a message defines."""

    definition: AnthropicTool


class ContentBlock(msgspec.Struct, frozen=True):
    """The types of an Anthropic block's fields."""

    type: Literal[
        "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
        "tool_addition", "tool_removal",
    ]  # fmt: skip
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: NamedTool | DefinedTool | None = None


def prompt_of(
    turns: Sequence[ConversationTurn],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    begins: bool = True,
    goes_on: bool = False,
) -> TokenizedPrompt:
    """The conversation as one prompt, in ChatML; the definitions of ``tools`` come first.

    An answer ``begins``, or the last turn ``goes_on``. Raises a 400 for no turn.
    """
    if not turns:
        raise ApiError(400, "Cannot apply chat template to an empty conversation.", "messages")
    defined = [ConversationTurn("system", "\n".join(json.dumps(tool) for tool in tools))] if tools else []
    texts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (*defined, *turns)]
    text = "".join(texts)
    if goes_on:
        text = text.removesuffix("<|im_end|>\n")
    return TokenizedPrompt.of_text(text + "<|im_start|>assistant\n" if begins else text)


def chat_turns(messages: Sequence[ChatMessage]) -> list[ConversationTurn]:
    """The turns of a chat; only an assistant and a function may say nothing by a null."""
    if any(each.content is None and each.role not in ("assistant", "function") for each in messages):
        raise ApiError(400, "content must be a string or a list of parts", "messages")
    return [
        ConversationTurn(
            each.role,
            _joined(
                _text(_unattributed(each.content) if each.role == "system" else each.content, _CHAT),
                [_called(call.function.name, call.function.arguments) for call in each.tool_calls or ()],
            ),
        )
        for each in messages
    ]


def anthropic_turns(messages: Iterable[ChatMessage], system: Content) -> list[ConversationTurn]:
    """The turns of Anthropic's messages: a result of a tool is a turn of its own, before the user's text."""
    given = _unattributed(system, blocks=True)
    turns = (
        [ConversationTurn("system", given if isinstance(given, str) else _block_text(given, "system"))]
        if given
        else []
    )
    for each in messages:
        if each.role not in ("user", "assistant", "system"):
            raise ApiError(400, "role must be user, assistant or system", "messages")
        if each.content is None or each.content is UNSET:
            raise ApiError(400, "content is required", "messages")
        blocks = [{"type": "text", "text": each.content}] if isinstance(each.content, str) else each.content
        if each.role == "system":
            blocks = _unattributed(blocks, blocks=True)
        said = list(blocks)
        results = [block.get("content") or "" for block in blocks if block.get("type") == "tool_result"]
        if each.role == "user":
            turns += [turn for result in results for turn in _result_turns(result)]
        else:
            said += [{"type": "text", "text": f"Tool result: {result}"} for result in results]
        calls = [
            _called(str(block.get("name", "")), block.get("input"))
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        text = _joined(_block_text(said, each.role), calls)
        if text or each.role == "assistant":
            turns.append(ConversationTurn(each.role, text))
    return turns


def _block_text(blocks: list[dict[str, Any]], role: str) -> str:
    """The text of Anthropic's blocks; a 400 for types that are none and for media, which a system's drop."""
    for block in blocks:
        checked = _block(block)
        if checked.type in _TOOL_CHANGES and (
            role != "system"
            or checked.tool is None
            or (checked.type == "tool_removal" and isinstance(checked.tool, DefinedTool))
        ):
            why = f"{checked.type} needs a message with role 'system', and a tool: to remove one, its name"
            raise ApiError(400, why, "messages")
        if block["type"] == "image" and block.get("source") and role != "system":
            raise ApiError(400, "this model is not multimodal: it takes no image", "messages")
    texts = [block for block in blocks if block["type"] == "text" and block.get("text") is not None]
    return _text(texts, {"text": "text"}, "" if role == "system" else "\n")


def _block(block: dict[str, Any]) -> ContentBlock:
    try:
        return msgspec.convert(block, ContentBlock)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), "messages") from None


def changed_tools(messages: Iterable[ChatMessage], tools: Iterable[AnthropicTool]) -> list[AnthropicTool]:
    """The tools after the additions and removals in ``messages``; a 400 for an unknown name."""
    known = {tool.name: tool for tool in tools}
    removed: set[str] = set()
    for each in messages:
        for raw in each.content if isinstance(each.content, list) else ():
            if raw.get("type") not in _TOOL_CHANGES or (tool := _block(raw).tool) is None:
                continue
            if isinstance(tool, DefinedTool):
                name = tool.definition.name
                known[name] = tool.definition
            elif (name := tool.name) not in known:
                raise ApiError(400, f"tool '{name}' is not declared in tools", "messages")
            (removed.add if raw["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in known.items() if name not in removed]


def _result_turns(content: object) -> list[ConversationTurn]:
    """The turns of a tool's result: its text, then the tools that it names; other parts are dropped."""
    if not isinstance(content, list):
        return [ConversationTurn("tool", _text(content, {}))]
    parts = [part for part in content if isinstance(part, dict)]
    if any(part.get("type") == "image" for part in parts):
        raise ApiError(400, "this model is not multimodal: it takes no image", "messages")
    texts = [{"text": "", **part} for part in parts if part.get("type") == "text"]
    names = [
        str(part.get("tool_name") or part.get("name"))
        for part in parts
        if part.get("type") == "tool_reference"
    ]
    named = [ConversationTurn("tool", "\n".join(names))] if names else []
    return [ConversationTurn("tool", _text(texts, {"text": "text"})), *named]


def responses_turns(given: str | list[dict[str, Any]], instructions: str | None) -> list[ConversationTurn]:
    """The turns of the input of a response; reasoning, text and calls in a row are one turn."""
    turns = [ConversationTurn("system", _unattributed(instructions))] if instructions else []
    if isinstance(given, str):
        return [*turns, ConversationTurn("user", given)]
    for item in given:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = _call_item(item)
            turns = _with_assistant(turns, _called(call.name, call.arguments))
        elif kind == "custom_tool_call":
            turns = _with_assistant(turns, _called(str(item.get("name")), {"input": item.get("input")}))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if item.get("output") is None or not isinstance(item.get("call_id", ""), str):
                raise ApiError(400, "an output needs its call_id, a string, and an output", "input")
            turns.append(ConversationTurn("tool", _text(item["output"], _INPUT)))
        elif kind == "reasoning":
            if "summary" not in item or item.get("encrypted_content"):
                raise ApiError(400, "reasoning needs a summary, and must not be encrypted", "input")
            turns = _with_assistant(turns, "")
        elif kind == "message" and item.get("role") == "assistant":
            # Parts of an answer are only known in an item that says that it is a message.
            fields = _INPUT | _OUTPUT if "type" in item else _INPUT
            turns = _with_assistant(turns, _text(item.get("content"), fields))
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            content = item.get("content")
            if content is None:
                raise ApiError(400, "content is required", "input")
            if item["role"] == "system":
                content = _unattributed(content)
            turns.append(ConversationTurn(item["role"], _text(content, _INPUT)))
        else:
            raise ApiError(400, f"Unsupported input item type: {kind}", "input")
    return turns


def _unattributed(content: Any, *, blocks: bool = False) -> Any:
    """A system prompt without Claude Code's header: its line, or with ``blocks`` the block that it begins."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_ATTRIBUTION) else content
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(_ATTRIBUTION):
            rest = text.partition("\n")[2]
            if rest and not blocks:
                kept.append({**part, "text": rest})
        else:
            kept.append(part)
    return kept


def _with_assistant(turns: list[ConversationTurn], text: str) -> list[ConversationTurn]:
    if turns and turns[-1].role == "assistant":
        return [*turns[:-1], ConversationTurn("assistant", _joined(turns[-1].text, [text]))]
    return [*turns, ConversationTurn("assistant", text)]


def _call_item(item: dict[str, Any]) -> FunctionCallItem:
    try:
        return msgspec.convert(item, FunctionCallItem)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), "input") from None


def _called(name: str, arguments: Any) -> str:
    """A call as the hermes format has it; arguments that are no JSON object count as none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _joined(text: str, more: Iterable[str]) -> str:
    return "\n".join(part for part in (text, *more) if part)


def _text(content: object, fields: Mapping[str, str], between: str = "\n") -> str:
    """The text of a message's content, whose parts have it in ``fields`` by type; a 400 for other parts."""
    if content is None or content is UNSET:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "content must be a string or a list of parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            raise ApiError(400, f"this model is not multimodal: it takes no {kind}", "messages")
        if not isinstance(kind, str) or kind not in fields:
            raise ApiError(400, f"Unsupported chat content part type: {kind!r}.", "messages")
        text = part.get(fields[kind])
        if not isinstance(text, str):
            raise ApiError(400, f"{fields[kind]} of a content part must be a string", "messages")
        texts.append(text)
    return between.join(texts)
