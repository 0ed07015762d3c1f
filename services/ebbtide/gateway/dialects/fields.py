"""Checks the fields of a request's body against its route's table, and states what the tables of several routes share.

Each dialect has its table beside it: which fields are supported, accepted without effect, and refused with a reason. A
field that is not in the table is refused by name. Nothing that changes what is generated is ignored. The tables are
printed in docs/reference/gateway-fields.md.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from ebbtide.errors import InvalidRequest

#: As `neutral`: every value is accepted, because none changes what is generated.
ANY: Final = "any value"


class FieldRule(Struct, frozen=True, kw_only=True):
    """What a route does with one field. A null always counts as a field that is left out."""

    support: Literal["supported", "neutral", "refused"]
    neutral: tuple[Any, ...] | str = ()  # the values accepted without effect, or `ANY`
    note: str = ""  # what the field means here, or why it is refused; for people


class RouteFields(Struct, frozen=True, kw_only=True):
    """The table of one route, or of one object inside its body."""

    route: str
    rules: dict[str, FieldRule]

    def checked(self, body: Mapping[str, Any], *, inside: str = "") -> dict[str, Any]:
        """The supported fields of `body` that are not null. Raises `InvalidRequest` naming the first other field.

        `inside`: the field of the body that the object stands in.
        """
        kept = {}
        for name, value in body.items():
            rule = self.rules.get(name)
            if rule is None:
                raise self._unknown(name, inside)
            if value is None:
                continue
            if rule.support == "supported":
                kept[name] = value
            elif not _is_neutral(value, rule):
                raise InvalidRequest(_refusal(rule), field=_joined(inside, name))
        return kept

    def _unknown(self, name: str, inside: str) -> InvalidRequest:
        close = difflib.get_close_matches(name[:100], self.rules, n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        return InvalidRequest(f"unknown field of {self.route}; {hint}", field=_joined(inside, name[:100]))


def supported(note: str = "") -> FieldRule:
    return FieldRule(support="supported", note=note)


def neutral(*values: Any, why: str) -> FieldRule:
    """A field of which only `values`, which change nothing, are accepted."""
    return FieldRule(support="neutral", neutral=values, note=why)


def ignored(note: str) -> FieldRule:
    """A field that changes nothing of what is generated, whatever its value."""
    return FieldRule(support="neutral", neutral=ANY, note=note)


def refused(why: str) -> FieldRule:
    return FieldRule(support="refused", note=why)


def _is_neutral(value: Any, rule: FieldRule) -> bool:
    if rule.neutral == ANY:
        return True
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in rule.neutral)


def _refusal(rule: FieldRule) -> str:
    accepted = " or ".join(repr(value) for value in rule.neutral)
    remedy = f"only {accepted} is accepted" if accepted else "leave it out"
    return f"not supported: {rule.note}; {remedy}"


def _joined(inside: str, name: str) -> str:
    return f"{inside}.{name}" if inside else name


NO_RESUME: Final = "another worker could not continue such a completion exactly"
NOT_RECORDED: Final = "a stored token holds its id, logprob and version, and nothing else"
_NO_ENGINE: Final = "the workers' sampling has no such option"
TEXT_ONLY: Final = "requests are text only"
#: Why no other route scores prompts.
SCORED_ELSEWHERE: Final = "prompts are scored by /v1/completions, which takes text and token ids"
_ENGINE_INSIDE: Final = "it is for an engine's own transfers of its KV cache"

ONE_RUN: Final = "a run's id or name; a key of one run decides alone"
MODEL: Final = supported(f"{ONE_RUN}, and the answer names the run")

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
    "presence_penalty": neutral(0, why=NO_RESUME),
    "frequency_penalty": neutral(0, why=NO_RESUME),
    "seed": supported(f"with temperature 0, where it changes nothing; else refused: {NO_RESUME}"),
    "logit_bias": neutral({}, why=_NO_ENGINE),
    "allowed_token_ids": refused(_NO_ENGINE),
    "bad_words": neutral([], why=_NO_ENGINE),
    "length_penalty": neutral(1, why="it is for beam search"),
    "watermarking": neutral(False, why=_NO_ENGINE),
    "spaces_between_special_tokens": neutral(True, why="the text follows the model's tokenizer"),
    "prompt_logprobs": refused(SCORED_ELSEWHERE),
    "logprob_token_ids": refused(NOT_RECORDED),
    "structured_outputs": refused(NO_RESUME),
    "repetition_detection": refused(_NO_ENGINE),
    "thinking_token_budget": neutral(-1, why=_NO_ENGINE),
}
#: What else vLLM's OpenAI routes take.
VLLM: Final[dict[str, FieldRule]] = {
    "use_beam_search": neutral(False, why=_NO_ENGINE),
    "truncate_prompt_tokens": refused("a prompt is never truncated: it is taken complete, or refused"),
    "truncation_side": refused("a prompt is never truncated: it is taken complete, or refused"),
    "priority": supported("lower goes first, among the run's requests; default 0"),
    "request_id": supported("as the header X-Request-ID, which counts if both are given"),
    "session_id": supported("as the header X-Session-ID, which counts if both are given"),
    "return_token_ids": supported("answers prompt_token_ids and token_ids"),
    "return_tokens_as_token_ids": supported("tokens of logprobs are called token_id:N"),
    "routed_experts_prompt_start": ignored("routed experts are not returned"),
    "return_token_offsets": neutral(False, why="prompts are not rendered without being generated from"),
    "mm_payload": neutral("tensors", "none", why=TEXT_ONLY),
    "return_mm_kwargs": ignored("requests are text only"),
    "cache_salt": ignored("it does not isolate caches: workers share prefix caches and clear them at each version"),
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
COMPLETIONS_EACH: Final = supported("completions of each prompt; default 1")
STREAMED: Final = supported("server-sent events; somebody waits for each token then, so the first comes at once")
TEXT_FORMAT: Final = neutral({"type": "text"}, why=NO_RESUME)
TOOL_CHOICE: Final = supported("auto or none; others are refused, as grammars cannot resume")
STREAM_OPTION_FIELDS: Final = RouteFields(
    route="stream_options",
    rules={
        "include_usage": supported("a last chunk with the usage"),
        "continuous_usage_stats": supported("the usage so far in each chunk"),
        "include_obfuscation": neutral(False, True, why="chunks are not padded"),
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
