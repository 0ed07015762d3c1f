"""States the fields of /v1/completions and /v1/chat/completions."""

from typing import Final

from ebbtide.gateway.fields.field_table import RouteFields, ignored, neutral, refused, supported
from ebbtide.gateway.fields.sampling_fields import (
    EBBTIDE,
    LABELS,
    NO_RESUME,
    NOT_RECORDED,
    SAMPLING,
    STREAM_OPTIONS,
    TEXT_ONLY,
    VLLM,
)

_MODEL: Final = supported("a run's id or name; a key of one run decides alone, and the answer names the run")
_N: Final = supported("completions of each prompt; default 1")
_STREAM: Final = supported("server-sent events; somebody waits for each token then, so the first comes at once")
_FORMAT: Final = neutral({"type": "text"}, why=NO_RESUME)

COMPLETION_FIELDS: Final = RouteFields(
    route="/v1/completions",
    rules={
        "model": _MODEL,
        "prompt": supported("a string, a list of strings, token ids, or a list of lists of token ids"),
        "max_tokens": supported("default 16; with echo 0 or 1, with prompt_logprobs 1"),
        "n": _N,
        "stream": _STREAM,
        "stream_options": supported("include_usage, continuous_usage_stats"),
        "logprobs": supported(
            "0 or 1: the sampled token's, under the distribution that it was sampled from; with echo 0 to 20"
        ),
        "add_special_tokens": supported("default true"),
        "echo": supported("with logprobs, at most one token, and no stream: the prompt with its scores"),
        "best_of": neutral(1, why=NOT_RECORDED),
        "suffix": refused("the models complete, and do not insert"),
        "prompt_embeds": refused(TEXT_ONLY),
        "response_format": _FORMAT,
        **SAMPLING,
        "prompt_logprobs": supported(
            "0 to 20 alternatives to each token of the prompt; with max_tokens 1, and no stream"
        ),
        **VLLM,
        **LABELS,
        **EBBTIDE,
    },
)
CHAT_FIELDS: Final = RouteFields(
    route="/v1/chat/completions",
    rules={
        "model": _MODEL,
        "messages": supported("text only; the model's own chat template renders them"),
        "max_tokens": supported("default: what the context leaves"),
        "max_completion_tokens": supported("as max_tokens"),
        "n": _N,
        "stream": _STREAM,
        "stream_options": supported("include_usage, continuous_usage_stats"),
        "logprobs": supported("the sampled token's, under the distribution that it was sampled from"),
        "top_logprobs": neutral(0, why=NOT_RECORDED),
        "tools": supported("functions; the gateway needs a tool parser for them"),
        "tool_choice": supported("auto or none; required and a named tool are refused, as grammars cannot resume"),
        "parallel_tool_calls": ignored("nothing limits the calls that a model writes"),
        "response_format": _FORMAT,
        "reasoning_effort": supported("handed to the chat template, with enable_thinking, as vLLM does"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "chat_template": refused("only the model's own template is rendered"),
        "add_generation_prompt": supported("default true"),
        "add_special_tokens": supported("default false"),
        "continue_final_message": neutral(False, why="a message is rendered whole"),
        "echo": neutral(False, why="answers hold what was generated"),
        "documents": neutral([], why="put them into messages"),
        "include_reasoning": supported("default true"),
        "return_prompt_text": neutral(False, why="ask for return_token_ids"),
        "functions": neutral([], why="they are an older form of tools"),
        "function_call": neutral("none", "auto", why="it is an older form of tool_choice"),
        "modalities": neutral(["text"], why=TEXT_ONLY),
        "audio": refused(TEXT_ONLY),
        "prediction": refused(NO_RESUME),
        "verbosity": neutral("medium", why="the models are not told of it"),
        "web_search_options": refused("the gateway searches nothing"),
        "moderation": refused("the gateway judges nothing"),
        "store": neutral(False, why="answers are not kept for later calls"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
        **SAMPLING,
        **VLLM,
        **LABELS,
        **EBBTIDE,
    },
)
STREAM_OPTION_FIELDS: Final = RouteFields(route="stream_options", rules=STREAM_OPTIONS)
MESSAGE_FIELDS: Final = RouteFields(
    route="a message",
    rules={
        "role": supported("developer counts as system"),
        "content": supported("a string, or a list of parts of type text"),
        "name": supported("handed to the chat template"),
        "tool_calls": supported("of an assistant; arguments are a string"),
        "tool_call_id": supported("of a tool's answer"),
        "reasoning": supported("of an assistant"),
        "reasoning_content": supported("as reasoning"),
        "refusal": refused("the models have no such channel"),
        "audio": refused(TEXT_ONLY),
        "function_call": refused("it is an older form of tool_calls"),
        "annotations": neutral([], why="the models write none"),
        "provider_specific_fields": ignored("a client's own"),
        "parsed": ignored("a client's own: what the openai client read of the content"),
    },
)
TOOL_FUNCTION_FIELDS: Final = RouteFields(
    route="a tool's function",
    rules={
        "name": supported(),
        "description": supported(),
        "parameters": supported("a JSON schema, handed to the chat template"),
        "strict": ignored("calls are as the model writes them, and may break their schema"),
        "defer_loading": neutral(False, why="all tools are in the prompt"),
    },
)
PART_FIELDS: Final = RouteFields(
    route="a content part",
    rules={
        "type": supported("text; on /v1/responses input_text, output_text and reasoning_text"),
        "text": supported(),
        "annotations": neutral([], why="the models write none"),
        "logprobs": ignored("they were answered, and say nothing of the text"),
        "cache_control": ignored("prefix caches need no marks"),
        "prompt_cache_breakpoint": ignored("prefix caches need no marks"),
    },
)
