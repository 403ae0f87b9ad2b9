"""The prompts of completions and embeddings in the simulated engine: texts or token ids."""

from __future__ import annotations

from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.pseudo_tokenizer import TokenizedPrompt, unknown_ids
from serve.engine.sim.sampling_parameters import Id, NotEmpty

# As in vLLM a boolean is a number.
Ids = list[Id | bool]
Prompts = NotEmpty | list[str | Id | bool | Ids]


def prompts_of(given: Prompts, param: str) -> list[TokenizedPrompt]:
    """Texts or token ids, one or several; raises a 400 for a mixture or nothing."""
    if isinstance(given, str):
        return [TokenizedPrompt.of_text(given)]
    if given and all(isinstance(item, int) for item in given):
        return [_prompt_of_ids([item for item in given if isinstance(item, int)], param)]
    prompts = []
    if len({type(item) for item in given}) > 1:
        raise ApiError(400, f"{param} must be texts or lists of token ids, no mixture of them", param)
    for item in given:
        if isinstance(item, str) and item:
            prompts.append(TokenizedPrompt.of_text(item))
        elif isinstance(item, list) and item:
            prompts.append(_prompt_of_ids(item, param))
        else:
            raise ApiError(400, f"{param} must be texts or lists of token ids", param)
    if not prompts:
        raise ApiError(400, f"{param} must not be empty", param)
    return prompts


def _prompt_of_ids(given: Ids, param: str) -> TokenizedPrompt:
    ids = list(map(int, given))
    if unknown := unknown_ids(ids):
        raise ApiError(400, f"Token id {unknown[0]} is out of vocabulary", param)
    return TokenizedPrompt.of_ids(ids)
