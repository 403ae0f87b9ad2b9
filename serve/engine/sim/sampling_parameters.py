"""The parameters of a generation: what vLLM's requests declare and its sampling parameters check (0.32).

As there, a number may come as text. Of most parameters only the validity matters: they change nothing in
this engine.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.pseudo_tokenizer import unknown_ids

Id = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# vLLM's VLLM_MAX_STOP_STRINGS and VLLM_MAX_N_SEQUENCES.
MOST_STOPS = 4
MOST_CHOICES = 16_384
Stops = Annotated[list[NotEmpty], Meta(max_length=MOST_STOPS)]
_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class JsonSchema(msgspec.Struct, frozen=True):
    """A named schema of an answer."""

    name: str
    schema: dict[str, Any] | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the schema has a type that exists, if it has one: no more of it is read."""
        kind = (self.schema or {}).get("type", [])
        return all(each in _SCHEMA_TYPES for each in (kind if isinstance(kind, list) else [kind]))


class ResponseFormat(msgspec.Struct, frozen=True):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, in all APIs."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: NotEmpty | None = None


class OpenAiSamplingFields(SamplingFields, frozen=True, kw_only=True):
    """How tokens are drawn, in OpenAI's APIs."""

    user: str | None = None
    request_id: str = ""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class GenerationFields(OpenAiSamplingFields, frozen=True, kw_only=True):
    """The parameters of a generation: ``n`` choices of each prompt.

    With ``max_tokens`` an answer has exactly that many tokens unless a stop sequence ends it. Without it
    the length is drawn from the seed, or the answer fills the context with ``ignore_eos``.
    """

    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: NotEmpty | Stops | None = None
    max_tokens: Positive | None = None
    min_tokens: Id = 0
    stop_token_ids: list[int] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    bad_words: list[NotEmpty] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    response_format: ResponseFormat | None = None


def check(sampling: GenerationFields, max_model_len: int) -> None:
    """Raise a 400 for parameters that contradict each other or the context."""
    most = sampling.max_tokens
    if most is not None and most > max_model_len:
        why = f"max_tokens={most} cannot be greater than max_model_len={max_model_len}."
        raise ApiError(400, why, "max_tokens")
    if most is not None and sampling.min_tokens > most:
        why = f"min_tokens must be less than or equal to max_tokens={most}, got {sampling.min_tokens}."
        raise ApiError(400, why, "min_tokens")
    if (sampling.truncate_prompt_tokens or 0) > max_model_len:
        why = f"truncate_prompt_tokens cannot be greater than max_model_len = {max_model_len}."
        raise ApiError(400, why, "truncate_prompt_tokens")
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
    ):
        if unknown := unknown_ids(ids or ()):
            raise ApiError(400, f"token_id(s) {unknown} in {name} contain out-of-vocab token ids.", name)
    form = sampling.response_format
    schema = None if form is None or form.json_schema is None else form.json_schema.schema
    if form is not None and form.type == "json_schema" and schema is None:
        raise ApiError(400, "a format of type 'json_schema' needs a schema", "response_format")
    if form is not None and form.json_schema is not None and not form.json_schema.is_valid:
        raise ApiError(400, f"the schema's type is none of {', '.join(_SCHEMA_TYPES)}", "response_format")
    tag = None if form is None or form.type != "structural_tag" else form.format
    if tag is not None and not isinstance(tag.get("type"), str):
        raise ApiError(400, "a structural tag's format needs a type", "response_format")
    if (outputs := sampling.structured_outputs) is not None:
        given = [kind for kind in _KINDS if outputs.get(kind) is not None]
        if len(given) != 1 or outputs.get("choice") == []:
            why = (
                f"structured outputs need one kind of constraint, which is not empty, of {', '.join(_KINDS)}"
            )
            raise ApiError(400, why, "structured_outputs")
        _check_constraint(given[0], outputs[given[0]])


def _check_constraint(kind: str, value: Any) -> None:
    """Raise a 400 for a constraint of which no grammar can be made, as far as it is read here."""
    try:
        if kind == "json" and isinstance(value, str):
            json.loads(value)
        elif kind == "regex":
            re.compile(value)
        elif kind == "grammar" and not any(sign in value for sign in ("::=", ":")):
            raise ValueError("it has no rule")
    except (ValueError, TypeError, re.error) as error:
        raise ApiError(400, f"the constraint '{kind}' is invalid: {error}", "structured_outputs") from None


def check_end(*, begins: bool, goes_on: bool) -> None:
    """Raise a 400 for a conversation in which an answer begins and the last message goes on."""
    if begins and goes_on:
        why = "continue_final_message and add_generation_prompt are not compatible."
        raise ApiError(400, why, "continue_final_message")


def check_prompt_logprobs(
    sampling: GenerationFields, echoed: int | None, *, logprobs: bool, stream: bool, has_adapters: bool
) -> None:
    """Raise a 400 where the log probabilities of a prompt are not to be had.

    ``echoed`` is how many per token an echo of the prompt implies; ``logprobs``: the answer has some.
    """
    wanted = sampling.prompt_logprobs
    if wanted and stream:
        raise ApiError(400, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    wanted = echoed if wanted is None else wanted
    if has_adapters and wanted is not None and (logprobs or wanted > 0):
        raise ApiError(400, "log probabilities of a prompt are not available with adapters", "echo")
