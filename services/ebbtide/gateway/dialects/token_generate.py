"""Speaks /inference/v1/generate: token ids in, token ids out."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.dialects.dialect import (
    AnswerContext,
    AskedText,
    Completions,
    Count,
    LogprobCount,
    OpenAIAnswer,
    Priority,
    SamplingBody,
    StreamOptions,
    TokenId,
    WeightVersionBody,
    chat_logprobs,
    logprobs_of,
    parsed_inside,
    stream_options,
    version_spans,
)
from ebbtide.gateway.dialects.fields import (
    EBBTIDE,
    NOT_RECORDED,
    ONE_RUN,
    SAMPLING,
    SCORED_ELSEWHERE,
    TEXT_ONLY,
    VLLM,
    RouteFields,
    ignored,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.request import IdsPrompt, TextRequest
from ebbtide.types.parse import parse
from ebbtide.types.tokens import TokenArray

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
        "model": supported(ONE_RUN),
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


class TokenSamplingBody(SamplingBody, kw_only=True):
    n: Completions = 1
    max_tokens: Count | None = None
    logprobs: LogprobCount | None = None


class GenerateBody(Struct, kw_only=True):
    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    output_mode: Literal["tokens", "text"] = "tokens"
    request_id: str = ""
    session_id: str = ""
    return_token_ids: bool = False
    priority: Priority = 0
    weight_version: WeightVersionBody = WeightVersionBody()


class TokenGenerateDialect:
    """Reads and answers requests of token ids."""

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(GenerateBody, GENERATE_FIELDS.checked(body))
        checked = TOKEN_SAMPLING_FIELDS.checked(asked.sampling_params, inside="sampling_params")
        sampling = parsed_inside(TokenSamplingBody, checked, "sampling_params")
        options = stream_options(asked.stream_options, stream=asked.stream)
        request = TextRequest(
            model=asked.model,
            prompts=[IdsPrompt(asked.token_ids)],
            sampling=sampling.sampling("sampling_params.seed"),
            max_tokens=sampling.max_tokens,
            n=sampling.n,
            stop=sampling.stops("sampling_params.stop"),
            keep_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
            logprobs=sampling.logprobs is not None,
            stream=asked.stream,
            priority=asked.priority,
            versions=asked.weight_version.wish(),
            request_id=asked.request_id,
            session_id=asked.session_id,
        )
        logprobs = sampling.logprobs is not None
        return AskedText(request, lambda context: TokenGenerateAnswer(asked, context, options, logprobs=logprobs))


class TokenGenerateAnswer(OpenAIAnswer):
    """The answer to one request."""

    def __init__(self, asked: GenerateBody, context: AnswerContext, options: StreamOptions, *, logprobs: bool) -> None:
        super().__init__(context, options)
        self._asked, self._logprobs = asked, logprobs
        self._results: dict[int, ChoiceResult] = {}

    def events(self, delta: ChoiceDelta) -> bytes:
        first = not self._results
        result = self._results.setdefault(delta.index, ChoiceResult(delta.index))
        result.add(delta)
        self._tally.add(delta.tokens)
        choice = self._choice(delta.index, delta.text, delta.tokens, delta.finish)
        if delta.finish is not None:
            choice["weight_versions"] = version_spans(result.tokens)
        return self._event(choice, finished=delta.finish is not None, **(self._prompt_ids() if first else {}))

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        choices = []
        for result in results:
            tokens = result.tokens
            self._tally.add(tokens)
            choice = self._choice(result.index, result.text, tokens, result.finish)
            choices.append(choice | {"weight_versions": version_spans(tokens)})
        of_run = {"created": self._context.created, "model": self._context.model, "usage": self._tally.usage()}
        return self._frame(choices) | of_run | self._tally.stamps() | self._prompt_ids()

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._context.played.prompt_of(0)} if self._asked.return_token_ids else {}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "request_id": self._context.request_id,
            "output_mode": self._asked.output_mode,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, tokens: TokenArray, finish: ChoiceFinish | None) -> dict[str, Any]:
        in_text = self._asked.output_mode == "text"
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": finish.reason if finish else None,
            "stop_reason": finish.stop if finish else None,
            "token_ids": tokens["id"].tolist(),
            "logprobs": None,
        }
        if in_text:
            choice["text"] = text
        if self._logprobs:
            named = chat_logprobs(tokens, self._context.token_text) if in_text else _id_logprobs(tokens)
            choice["logprobs"] = named
        return choice


def _id_logprobs(tokens: TokenArray) -> dict[str, Any]:
    """As /inference/v1/generate has them: `token_id` is vLLM's, and `token` is what the client of verifiers reads."""
    pairs = zip(tokens["id"].tolist(), logprobs_of(tokens), strict=True)
    content = [
        {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content}
