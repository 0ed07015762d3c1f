"""States the fields that several routes share: how tokens are sampled, what is answered, and vLLM's additions."""

from typing import Final

from ebbtide.gateway.fields.field_table import FieldRule, ignored, neutral, refused, supported

_NO_RESUME: Final = "a completion that goes on at another worker could not continue it exactly"
_NOT_RECORDED: Final = "a stored token holds its id, logprob and version, and nothing else"
_NO_ENGINE: Final = "the workers do not sample so"
_TEXT_ONLY: Final = "requests are text only"
#: Why no other route scores prompts.
SCORED_ELSEWHERE: Final = "prompts are scored by /v1/completions, which takes text and token ids"
_ENGINE_INSIDE: Final = "it is for an engine's own transfers of keys and values"

#: Sampling as the OpenAI routes and vLLM's sampling parameters name it.
SAMPLING: Final[dict[str, FieldRule]] = {
    "temperature": supported("0 to 100; 0 is greedy; default 1"),
    "top_p": supported("above 0, at most 1; default 1"),
    "top_k": supported("0 and -1: off; default 0"),
    "min_p": supported("0 to 1; default 0: off; workers that draft tokens do not take it"),
    "repetition_penalty": supported("above 0; default 1; it counts prompt and response alike"),
    "min_tokens": supported("default 0; within them only the length ends a completion"),
    "stop": supported("a string or a list; the gateway finds it in the text and cancels the rest"),
    "stop_token_ids": supported("default none"),
    "ignore_eos": supported("default false"),
    "skip_special_tokens": supported("default true"),
    "include_stop_str_in_output": supported("default false"),
    "presence_penalty": neutral(0, why=_NO_RESUME),
    "frequency_penalty": neutral(0, why=_NO_RESUME),
    "seed": supported(f"with temperature 0, where it changes nothing; else refused: {_NO_RESUME}"),
    "logit_bias": neutral({}, why=_NO_ENGINE),
    "allowed_token_ids": refused(_NO_ENGINE),
    "bad_words": neutral([], why=_NO_ENGINE),
    "length_penalty": neutral(1, why="it is for beam search"),
    "watermarking": neutral(False, why=_NO_ENGINE),
    "spaces_between_special_tokens": neutral(True, why="the text follows the model's tokenizer"),
    "prompt_logprobs": refused(SCORED_ELSEWHERE),
    "logprob_token_ids": refused(_NOT_RECORDED),
    "structured_outputs": refused(_NO_RESUME),
    "repetition_detection": refused(_NO_ENGINE),
    "thinking_token_budget": neutral(-1, why=_NO_ENGINE),
}
#: What else vLLM's OpenAI routes take.
VLLM: Final[dict[str, FieldRule]] = {
    "use_beam_search": neutral(False, why=_NO_ENGINE),
    "truncate_prompt_tokens": refused("a prompt is taken whole, or refused"),
    "truncation_side": refused("a prompt is taken whole, or refused"),
    "priority": supported("lower goes first, among the run's requests; default 0"),
    "request_id": supported("as the header X-Request-ID, which counts if both are given"),
    "session_id": supported("as the header X-Session-ID, which counts if both are given"),
    "return_token_ids": supported("answers prompt_token_ids and token_ids"),
    "return_tokens_as_token_ids": supported("tokens of logprobs are called token_id:N"),
    "routed_experts_prompt_start": ignored("routed experts are not answered, from wherever on"),
    "return_token_offsets": neutral(False, why="prompts are not rendered without being generated from"),
    "mm_payload": neutral("tensors", "none", why=_TEXT_ONLY),
    "return_mm_kwargs": ignored("requests are text only"),
    "cache_salt": ignored("it is no wall: workers share prefix caches, and clear them at each version"),
    "kv_transfer_params": refused(_ENGINE_INSIDE),
    "ec_transfer_params": refused(_ENGINE_INSIDE),
    "vllm_xargs": neutral({}, why="the workers have no such extensions"),
    "stream_interval": ignored("chunks follow the workers' flushes"),
}
#: What every route that generates takes beyond the shapes that it imitates.
EBBTIDE: Final[dict[str, FieldRule]] = {
    "weight_version": supported("an object with min_version or exact_version; unmet: 409, to be tried again"),
}
#: Fields of OpenAI's routes that say nothing about the text.
LABELS: Final[dict[str, FieldRule]] = {
    "user": ignored("a label"),
    "metadata": ignored("a label"),
    "safety_identifier": ignored("a label"),
    "service_tier": neutral("auto", "default", why="there is one tier"),
    "prompt_cache_key": ignored("prefix caches need no key"),
    "prompt_cache_options": ignored("prefix caches need no options"),
    "prompt_cache_retention": ignored("prefix caches are kept as long as there is room"),
}
STREAM_OPTIONS: Final[dict[str, FieldRule]] = {
    "include_usage": supported("a last chunk with the usage"),
    "continuous_usage_stats": supported("the usage so far in each chunk"),
    "include_obfuscation": neutral(False, True, why="chunks are not padded"),
}
NOT_RECORDED: Final = _NOT_RECORDED
NO_RESUME: Final = _NO_RESUME
TEXT_ONLY: Final = _TEXT_ONLY
