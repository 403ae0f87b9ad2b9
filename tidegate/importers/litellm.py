"""LiteLLM's `config.yaml` as a deployment file: its OpenAI-compatible servers become external ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from policy.config.convert import convert
from policy.config.deployment import NAME
from policy.errors import ConfigError
from store.key_derivation import digest_of
from tidegate.importers.vllm_flags import ImportedDeployment

# LiteLLM's, where its clients expect it.
PORT = 4000
# Providers whose servers speak OpenAI's API; the name after the slash is the server's own.
_COMPATIBLE = frozenset({"openai", "hosted_vllm", "vllm", "text-completion-openai", "litellm_proxy"})
_OPENAI = "https://api.openai.com/v1"
_ENVIRONMENT = "os.environ/"
_PER_MILLION = 1_000_000


class _Costs(msgspec.Struct):
    input_cost_per_token: float | None = None
    output_cost_per_token: float | None = None
    cache_read_input_token_cost: float | None = None


class _Parameters(_Costs):
    model: str = ""
    api_base: str | None = None
    api_key: str | None = None
    rpm: int | None = None
    tpm: int | None = None


class _Information(_Costs):
    mode: str | None = None


class _Entry(msgspec.Struct):
    model_name: str
    litellm_params: _Parameters
    model_info: _Information | None = None


class _Fallbacks(msgspec.Struct):
    fallbacks: list[Any] | None = None


class _General(msgspec.Struct):
    master_key: str | None = None
    database_url: str | None = None


class _Config(msgspec.Struct):
    model_list: list[_Entry]
    general_settings: _General | None = None
    litellm_settings: _Fallbacks | None = None
    router_settings: _Fallbacks | None = None


def from_litellm(raw: Mapping[str, Any]) -> ImportedDeployment:
    """The deployment of LiteLLM's configuration; what has no counterpart is named in the notes.

    Raises :class:`policy.errors.ConfigError` for values of another type, and if no model can be served.
    """
    config = convert(raw, _Config, "")
    notes: list[str] = []
    models: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(config.model_list):
        at = f"model_list[{number}]"
        name, given = entry.model_name, entry.litellm_params
        provider, _, theirs = given.model.partition("/")
        if not NAME.fullmatch(name) or provider not in _COMPATIBLE or not theirs:
            notes.append(f"{at} ({name}: {given.model}) is left out: it is no OpenAI-compatible server")
            continue
        model = models.setdefault(name, {"name": name, "engine": "external", "urls": []})
        model["urls"].append(_server(entry, theirs, at, notes))
        if entry.model_info is not None and entry.model_info.mode == "embedding":
            model["runner"] = "pooling"
        for costs in (entry.model_info, given):
            if costs is not None and (price := _price(costs)):
                model["price"] = price
    if not models:
        expected = "a model on an OpenAI-compatible server"
        raise ConfigError("model_list", [entry.model_name for entry in config.model_list], expected)
    document: dict[str, Any] = {
        "models": list(models.values()),
        "gateway": {"host": "127.0.0.1", "port": PORT, "admin_port": PORT + 1},
    }
    if config.general_settings is not None:
        _keys(config.general_settings, document, notes)
    for section in (config.litellm_settings, config.router_settings):
        if section is not None and section.fallbacks:
            notes.append("fallbacks are left out: `upstreams` with a price and a cost cap replace them")
    return ImportedDeployment(document, notes)


def _server(entry: _Entry, theirs: str, at: str, notes: list[str]) -> dict[str, Any]:
    given = entry.litellm_params
    server: dict[str, Any] = {"url": given.api_base or _OPENAI}
    if theirs != entry.model_name:
        server["model"] = theirs
    key = given.api_key or ""
    if key.startswith(_ENVIRONMENT):
        server["key_env"] = key.removeprefix(_ENVIRONMENT)
    elif key:
        notes.append(f"{at}.litellm_params.api_key is not copied: write it to a file, and set key_file")
    if given.rpm or given.tpm:
        notes.append(f"{at}: rpm and tpm of a server are left out; limits are those of tenants and keys")
    return server


def _price(given: _Costs) -> dict[str, float]:
    if given.input_cost_per_token is None or given.output_cost_per_token is None:
        return {}
    price = {"input": _million(given.input_cost_per_token), "output": _million(given.output_cost_per_token)}
    if given.cache_read_input_token_cost is not None:
        price["cached_input"] = _million(given.cache_read_input_token_cost)
    return price


def _million(per_token: float) -> float:
    return round(per_token * _PER_MILLION, 6)


def _keys(settings: _General, document: dict[str, Any], notes: list[str]) -> None:
    master = settings.master_key or ""
    if master and not master.startswith(_ENVIRONMENT):
        digest = digest_of(master.encode())
        document["tenants"] = [{"name": "master", "keys_sha256": [digest], "admin": True}]
    elif master:
        notes.append("general_settings.master_key is a variable: create a key with `tidegate keys create`")
    if settings.database_url:
        notes.append(
            "keys and budgets in LiteLLM's database are left out: `tidegate tenants`, `tidegate keys`"
        )
