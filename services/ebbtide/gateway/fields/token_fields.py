"""States the fields of the routes that take token ids: /inference/v1/generate, SGLang's /generate, and /tokenize."""

from typing import Final

from ebbtide.gateway.fields.field_table import RouteFields, ignored, neutral, refused, supported
from ebbtide.gateway.fields.sampling_fields import (
    EBBTIDE,
    NO_RESUME,
    NOT_RECORDED,
    SAMPLING,
    SCORED_ELSEWHERE,
    TEXT_ONLY,
    VLLM,
)

_MODEL: Final = supported("a run's id or name; a key of one run decides alone")
_TOKEN_SAMPLING: Final = {
    **SAMPLING,
    "n": supported("default 1"),
    "max_tokens": supported("default: what the context leaves"),
    "logprobs": supported("0 or 1: the sampled token's, under the distribution that it was sampled from"),
    "detokenize": ignored("output_mode says whether text is answered"),
    "flat_logprobs": ignored("a form inside vLLM"),
    "output_kind": ignored("stream says it"),
    "stream_interval": ignored("chunks follow the workers' flushes"),
    "skip_clone": ignored("a form inside vLLM"),
    "output_text_buffer_length": ignored("a form inside vLLM"),
    "skip_reading_prefix_cache": ignored("a prefix cache changes no token"),
    "extra_args": neutral({}, why="the workers have no such extensions"),
    "prompt_logprob_token_ids": refused(SCORED_ELSEWHERE),
    "prompt_logprob_start": neutral(0, why=SCORED_ELSEWHERE),
    "trace_decode_token_ids": refused(NOT_RECORDED),
    "routed_experts_prompt_start": ignored("routed experts are not answered, from wherever on"),
}
TOKEN_SAMPLING_FIELDS: Final = RouteFields(route="sampling_params", rules=_TOKEN_SAMPLING)
GENERATE_FIELDS: Final = RouteFields(
    route="/inference/v1/generate",
    rules={
        "model": _MODEL,
        "token_ids": supported("the prompt"),
        "sampling_params": supported("an object: see its own table"),
        "stream": supported("server-sent events"),
        "stream_options": supported("include_usage, continuous_usage_stats"),
        "output_mode": supported("tokens or text; default tokens"),
        "features": refused(TEXT_ONLY),
        "content_parts": neutral([], why=TEXT_ONLY),
        "token_offsets": ignored("they say nothing that the ids do not"),
        "reasoning_ended": ignored("it is for grammars"),
        "reasoning_parser_kwargs": ignored("it is for grammars"),
        **{name: VLLM[name] for name in ("request_id", "session_id", "return_token_ids", "cache_salt", "priority")},
        **{name: VLLM[name] for name in ("kv_transfer_params", "ec_transfer_params")},
        **EBBTIDE,
    },
)
SGLANG_FIELDS: Final = RouteFields(
    route="/generate",
    rules={
        "model": _MODEL,
        "text": supported("the prompt; or input_ids"),
        "input_ids": supported("the prompt as token ids"),
        "sampling_params": supported("an object: see its own table"),
        "stream": supported("server-sent events with the text so far"),
        "return_logprob": supported("answers meta_info.output_token_logprobs, of sampled tokens"),
        "logprob_start_len": neutral(-1, why=SCORED_ELSEWHERE),
        "top_logprobs_num": neutral(0, why=NOT_RECORDED),
        "token_ids_logprob": refused(NOT_RECORDED),
        "return_text_in_logprobs": supported("default false"),
        "return_routed_experts": neutral(False, why=NOT_RECORDED),
        "return_hidden_states": neutral(False, why=NOT_RECORDED),
        "return_bytes": neutral(False, why=NOT_RECORDED),
        "rid": supported("as the header X-Request-ID, which counts if both are given"),
        "session_params": refused("name the session by the header X-Session-ID"),
        "priority": supported("lower goes first, among the run's requests; default 0"),
        "log_metrics": ignored("requests are always counted"),
        "image_data": refused(TEXT_ONLY),
        "audio_data": refused(TEXT_ONLY),
        "video_data": refused(TEXT_ONLY),
        "input_embeds": refused(TEXT_ONLY),
        "modalities": neutral([], why=TEXT_ONLY),
        "lora_path": refused("a run is served by versions of all its weights"),
        "custom_logit_processor": refused("code of clients is not run"),
        **EBBTIDE,
    },
)
SGLANG_SAMPLING_FIELDS: Final = RouteFields(
    route="/generate: sampling_params",
    rules={
        "max_new_tokens": supported("default 128"),
        "min_new_tokens": supported("default 0"),
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos")},
        **{name: SAMPLING[name] for name in ("repetition_penalty", "skip_special_tokens", "min_p", "logit_bias")},
        **{name: SAMPLING[name] for name in ("presence_penalty", "frequency_penalty")},
        **{name: SAMPLING[name] for name in ("spaces_between_special_tokens",)},
        "no_stop_trim": supported("keeps the stop in the text; default false"),
        "n": supported("default 1"),
        "sampling_seed": refused(NO_RESUME),
        "stop_regex": refused("only strings and token ids stop"),
        "json_schema": refused(NO_RESUME),
        "regex": refused(NO_RESUME),
        "ebnf": refused(NO_RESUME),
        "structural_tag": refused(NO_RESUME),
        "stream_interval": ignored("chunks follow the workers' flushes"),
        "custom_params": neutral({}, why="code of clients is not run"),
    },
)
TOKENIZE_FIELDS: Final = RouteFields(
    route="/tokenize",
    rules={
        "model": _MODEL,
        "prompt": supported("a text; or messages"),
        "messages": supported("a chat, rendered by the model's template"),
        "add_special_tokens": supported("default true for a prompt, false for messages"),
        "add_generation_prompt": supported("default true"),
        "return_token_strs": supported("answers token_strs"),
        "tools": supported("functions, handed to the chat template"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "chat_template": refused("only the model's own template is rendered"),
        "continue_final_message": neutral(False, why="a message is rendered whole"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
    },
)
