"""The fields of request bodies that reach a replica, by route; all others are left out of what is sent there.

Listed are those that vLLM reads (0.32), those that OpenAI's and Anthropic's APIs define, which engines ignore
and fallback providers may not, and what earlier versions of vLLM called theirs.
"""

from __future__ import annotations

# They steer an engine past what a tenant may decide: scheduling, caches, files, foreign templates.
STEERING = (
    "priority",
    "request_id",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "prompt_embeds",
    "allowed_token_ids",
    "use_beam_search",
    "return_prompt_text",
    "prompt_logprobs",
    "chat_template",
)


def _names(*lists: str) -> frozenset[str]:
    return frozenset(name for names in lists for name in names.split())


_ANY = "model user cache_salt metadata"
_SAMPLING = """
    temperature top_p top_k min_p seed stop stop_token_ids presence_penalty frequency_penalty
    repetition_penalty logit_bias top_logprobs stream stream_options structured_outputs ignore_eos
    include_stop_str_in_output
    skip_special_tokens watermarking session_id mm_payload return_mm_kwargs store service_tier
    safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options moderation
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
"""
_GENERATION = """
    n best_of logprobs max_tokens min_tokens length_penalty early_stopping spaces_between_special_tokens
    truncate_prompt_tokens truncation_side bad_words logprob_token_ids echo add_special_tokens response_format
    return_tokens_as_token_ids return_token_ids return_token_offsets routed_experts_prompt_start
    repetition_detection thinking_token_budget stream_interval
"""
_TEMPLATE = """
    messages tools add_generation_prompt continue_final_message add_special_tokens chat_template_kwargs
"""
_CHAT = """
    max_completion_tokens tool_choice parallel_tool_calls reasoning_effort include_reasoning documents
    reasoning verbosity modalities audio prediction web_search_options functions function_call
    thinking enable_thinking
"""
_RESPONSES = """
    input instructions include include_reasoning background max_output_tokens max_tool_calls
    parallel_tool_calls previous_response_id previous_input_messages prompt reasoning text tools tool_choice
    truncation conversation context_management enable_response_messages chat_template_kwargs client_metadata
    access_programs image
"""
_MESSAGES = """
    messages system max_tokens output_config output_format thinking tools tool_choice chat_template_kwargs
    context_management container mcp_servers betas speed inference_geo fallbacks cache_control compaction
    diagnostics user_profile_id workspace_id billing_policy fallback_credit_token thread
"""
_MESSAGES_SAMPLING = """
    stop_sequences temperature top_k top_p stream service_tier watermarking mm_payload return_mm_kwargs
"""
_POOLING = """
    truncate_prompt_tokens truncation_side padding use_activation activation normalize encoding_format
    embed_dtype endianness dimensions add_special_tokens
"""
_SCORING = "max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs"

KNOWN: dict[str, frozenset[str]] = {
    "/v1/chat/completions": _names(_ANY, _SAMPLING, _GENERATION, _TEMPLATE, _CHAT),
    "/v1/completions": _names(_ANY, _SAMPLING, _GENERATION, "prompt suffix"),
    "/v1/responses": _names(_ANY, _SAMPLING, _RESPONSES),
    "/v1/messages": _names(_ANY, _MESSAGES, _MESSAGES_SAMPLING),
    "/v1/messages/count_tokens": _names(_ANY, _MESSAGES),
    "/v1/embeddings": _names(
        _ANY, _POOLING, "input messages add_generation_prompt continue_final_message chat_template_kwargs"
    ),
    "/v1/score": _names(
        _ANY, _POOLING, _SCORING, "text_1 text_2 data_1 data_2 queries documents items input_1 input_2"
    ),
    "/v1/rerank": _names(
        _ANY, _POOLING, _SCORING, "query documents top_n return_documents rank_fields max_chunks_per_doc"
    ),
    "/v1/tokenize": _names(_ANY, _TEMPLATE, "prompt return_token_strs"),
    "/v1/detokenize": _names(_ANY, "tokens"),
}
"""By path; those of :data:`STEERING` are known everywhere, and refused."""
