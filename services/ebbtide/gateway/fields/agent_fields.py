"""States the fields of /v1/responses and /v1/messages."""

from typing import Final

from ebbtide.gateway.fields.field_table import RouteFields, ignored, neutral, refused, supported
from ebbtide.gateway.fields.sampling_fields import EBBTIDE, LABELS, NOT_RECORDED, SAMPLING, TEXT_ONLY, VLLM

_MODEL: Final = supported("a run's id or name; a key of one run decides alone, and the answer names the run")
_NOT_KEPT: Final = "answers are not kept for later calls; send the whole conversation"
_CHOICE: Final = supported("auto or none; others are refused, as grammars cannot resume")
#: What Claude Code asks for, and what is done anyway.
_KEEPS_THOUGHTS: Final = {"type": "clear_thinking_20251015", "keep": "all"}

RESPONSES_FIELDS: Final = RouteFields(
    route="/v1/responses",
    rules={
        "model": _MODEL,
        "input": supported("a string, or items: messages, function calls, their outputs, and reasoning; text only"),
        "instructions": supported("a system message before the input"),
        "max_output_tokens": supported("default: what the context leaves"),
        "stream": supported("server-sent events"),
        "stream_options": neutral(
            {"include_obfuscation": False}, {"include_obfuscation": True}, why="nothing is padded"
        ),
        "tools": supported("functions, and namespaces of them; the gateway needs a tool parser for them"),
        "tool_choice": _CHOICE,
        "parallel_tool_calls": ignored("nothing limits the calls that a model writes"),
        "reasoning": supported("effort is handed to the chat template; summary: none is written"),
        "text": supported("an object whose format is of type text"),
        "include": supported("message.output_text.logprobs; reasoning.encrypted_content, though reasoning is in clear"),
        "store": ignored("answers are not kept; the answer says so"),
        "client_metadata": ignored("a label"),
        "max_tool_calls": ignored("it bounds tools that a server runs, and there are none"),
        "previous_response_id": refused(_NOT_KEPT),
        "previous_input_messages": refused(_NOT_KEPT),
        "conversation": refused(_NOT_KEPT),
        "background": neutral(False, why=_NOT_KEPT),
        "prompt": refused("templates of prompts are not kept here"),
        "context_management": refused("a conversation is taken whole, or refused"),
        "truncation": neutral("disabled", why="a prompt is taken whole, or refused"),
        "top_logprobs": neutral(0, why=NOT_RECORDED),
        "enable_response_messages": neutral(False, why=_NOT_KEPT),
        "include_reasoning": supported("default true"),
        "chat_template_kwargs": supported("handed to the chat template"),
        "image": refused(TEXT_ONLY),
        "moderation": refused("the gateway judges nothing"),
        "access_programs": refused("there are none"),
        "media_io_kwargs": neutral({}, why=TEXT_ONLY),
        "mm_processor_kwargs": neutral({}, why=TEXT_ONLY),
        **SAMPLING,
        **{name: VLLM[name] for name in ("priority", "request_id", "session_id", "cache_salt", "vllm_xargs")},
        **{name: VLLM[name] for name in ("mm_payload", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params")},
        **LABELS,
        **EBBTIDE,
    },
)
MESSAGES_FIELDS: Final = RouteFields(
    route="/v1/messages",
    rules={
        "model": _MODEL,
        "messages": supported("blocks of type text, thinking, tool_use and tool_result"),
        "system": supported("a string, or blocks of type text"),
        "max_tokens": supported(
            "required; what the context leaves counts if it is less, and an answer cut by it ends by max_tokens"
        ),
        "stream": supported("server-sent events"),
        "stop_sequences": supported("the gateway finds them in the text and cancels the rest"),
        "temperature": SAMPLING["temperature"],
        "top_p": SAMPLING["top_p"],
        "top_k": SAMPLING["top_k"],
        "tools": supported("functions of the client; the gateway needs a tool parser for them"),
        "tool_choice": _CHOICE,
        "thinking": supported("for the chat template; a budget below max_tokens cannot be held"),
        "output_config": supported("effort, for the chat template"),
        "metadata": ignored("a label"),
        "user_profile_id": ignored("a label"),
        "workspace_id": ignored("a label"),
        "diagnostics": ignored("nothing is diagnosed"),
        "cache_control": ignored("prefix caches need no marks"),
        "service_tier": neutral("auto", "standard_only", why="there is one tier"),
        "speed": neutral("standard", why="there is one speed"),
        "inference_geo": refused("where workers are is not chosen by request"),
        "container": refused("no code runs here"),
        "mcp_servers": neutral([], why="the gateway calls no tools"),
        "context_management": neutral(
            {"edits": []}, {"edits": [_KEEPS_THOUGHTS]}, why="a conversation is taken whole, or refused"
        ),
        "chat_template_kwargs": supported("handed to the chat template"),
        "watermarking": SAMPLING["watermarking"],
        "mm_payload": VLLM["mm_payload"],
        "return_mm_kwargs": VLLM["return_mm_kwargs"],
        "cache_salt": VLLM["cache_salt"],
        "kv_transfer_params": VLLM["kv_transfer_params"],
        "ec_transfer_params": VLLM["ec_transfer_params"],
        "vllm_xargs": VLLM["vllm_xargs"],
        "priority": VLLM["priority"],
        **EBBTIDE,
    },
)
#: The fields of a tool on both routes, beside its type.
AGENT_TOOL_FIELDS: Final = RouteFields(
    route="a tool",
    rules={
        "type": supported(
            "function on /v1/responses; custom, or nothing, on /v1/messages; a web_search with nothing but "
            "external_web_access: false is left out: it searches a provider's cache, which is not here"
        ),
        "name": supported(),
        "description": supported(),
        "parameters": supported("on /v1/responses: a JSON schema, handed to the chat template"),
        "input_schema": supported("on /v1/messages: a JSON schema, handed to the chat template"),
        "strict": ignored("calls are as the model writes them, and may break their schema"),
        "defer_loading": neutral(False, why="all tools are in the prompt"),
        "cache_control": ignored("prefix caches need no marks"),
        "eager_input_streaming": ignored("calls are streamed as they come"),
        "input_examples": refused("put them into the description"),
        "allowed_callers": neutral(["direct"], why="no code runs here"),
    },
)
#: The fields of a namespace on /v1/responses.
NAMESPACE_FIELDS: Final = RouteFields(
    route="a namespace of tools",
    rules={
        "type": supported("namespace, on /v1/responses"),
        "name": supported("1 to 128 characters; an answer's calls of its functions have it"),
        "description": ignored("chat templates take functions alone"),
        "tools": supported(
            "functions; models call them by their own names, so one whose name another function of the request has is "
            "refused"
        ),
    },
)
#: The fields of an item of a response's input. Which of them an item needs follows from its type.
ITEM_FIELDS: Final = RouteFields(
    route="an input item",
    rules={
        "type": supported("message, reasoning, function_call or function_call_output"),
        "role": supported("of a message; developer counts as system"),
        "content": supported("of a message: a string, or parts of text; of reasoning: parts of type reasoning_text"),
        "call_id": supported("of a call and of its output"),
        "name": supported("of a call"),
        "arguments": supported("of a call: a string"),
        "output": supported("of a call: a string, or parts of text"),
        "id": ignored("a label"),
        "status": ignored("a label"),
        "phase": ignored("a label"),
        "summary": ignored("of reasoning; its content counts"),
        "encrypted_content": refused("nothing is encrypted here; send the content of reasoning"),
        "namespace": ignored("of a call: models call functions by their own names"),
        "caller": refused("no code runs here"),
    },
)
#: The fields of a block of a message's content. Which of them a block needs follows from its type.
BLOCK_FIELDS: Final = RouteFields(
    route="a content block",
    rules={
        "type": supported("text, thinking, tool_use or tool_result"),
        "text": supported(),
        "thinking": supported(),
        "id": supported("of tool_use"),
        "name": supported("of tool_use"),
        "input": supported("of tool_use: an object"),
        "tool_use_id": supported("of tool_result"),
        "content": supported("of tool_result: a string, or blocks of type text"),
        "is_error": ignored("chat templates know no such mark; the result's text has to say it"),
        "signature": ignored("thoughts are not signed"),
        "cache_control": ignored("prefix caches need no marks"),
        "citations": neutral([], why="the models write none"),
        "caller": refused("no code runs here"),
    },
)
