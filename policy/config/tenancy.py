"""Tenants and API keys: limits and permissions of each, and prices of models.

Field names are LiteLLM's where they mean the same.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from policy.config.control import Section
from policy.types import Priority


class LimitName(StrEnum):
    """The limits of a tenant or a key, by the field that sets them."""

    REQUESTS = "rpm_limit"
    TOKENS = "tpm_limit"
    PARALLEL = "max_parallel_requests"
    BUDGET = "max_budget"


class Feature(StrEnum):
    """What a request may use beyond text, by the parameter or the route that asks for it."""

    TOOLS = "tools"
    IMAGES = "images"
    LOGPROBS = "logprobs"
    STRUCTURED_OUTPUTS = "structured_outputs"
    EMBEDDINGS = "embeddings"


class AccessPolicy(Section, frozen=True, kw_only=True):
    """What a tenant or a key may use; a request must be within both.

    ``rpm_limit`` and ``tpm_limit`` are requests and tokens per minute, ``max_parallel_requests`` requests in
    flight, ``max_budget`` money per ``budget_duration`` (``30s``, ``12h``, ``7d``, ``1mo``; without it
    forever), in the currency of the models' prices. Limits in ``dry_run`` are counted and shown, not
    enforced. ``max_tokens`` is the longest answer. Empty ``models`` and ``adapters`` allow all, ``None`` for
    ``features`` too. ``metadata`` is the operator's.
    """

    rpm_limit: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None
    tpm_limit: Annotated[int, Meta(ge=1, le=1_000_000_000_000)] | None = None
    max_parallel_requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_budget: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    budget_duration: str | None = None
    dry_run: tuple[LimitName, ...] = ()
    max_tokens: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    features: tuple[Feature, ...] | None = None
    metadata: dict[str, Any] = {}


class Tenant(AccessPolicy, frozen=True, kw_only=True):
    """A client with its own API keys: ``keys_sha256`` are the digests in hex of those declared in the file.

    ``weight`` is its share when tenants compete; ``admin`` allows it to ask for the reasons of routing.
    """

    name: str
    keys_sha256: tuple[str, ...] = ()
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    priority: Priority = Priority.STANDARD
    admin: bool = False


class TokenPrice(Section, frozen=True, kw_only=True):
    """Prices per million tokens of a model, in one currency.

    ``cached_input`` is that of prompt tokens from the prefix cache (by default as ``input``). Requests of
    priority ``batch`` pay the fraction ``batch`` of all.
    """

    input: Annotated[float, Meta(ge=0, le=1e6)]
    output: Annotated[float, Meta(ge=0, le=1e6)]
    cached_input: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    batch: Annotated[float, Meta(ge=0, le=1)] = 1.0
