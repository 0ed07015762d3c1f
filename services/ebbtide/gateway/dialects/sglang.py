"""Speaks SGLang's POST /generate."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceResult
from ebbtide.gateway.dialects.dialect import (
    AnswerContext,
    AskedText,
    Completions,
    Count,
    OpenAIAnswer,
    Priority,
    SamplingBody,
    StreamOptions,
    TokenId,
    TokenTally,
    WeightVersionBody,
    data_event,
    logprobs_of,
    parsed_inside,
)
from ebbtide.gateway.dialects.fields import (
    EBBTIDE,
    NO_RESUME,
    NOT_RECORDED,
    ONE_RUN,
    SAMPLING,
    SCORED_ELSEWHERE,
    TEXT_ONLY,
    RouteFields,
    ignored,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.request import IdsPrompt, Prompt, RawPrompt, TextRequest
from ebbtide.types.parse import parse

SGLANG_FIELDS: Final = RouteFields(
    route="/generate",
    rules={
        "model": supported(ONE_RUN),
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


#: As each event repeats all before it, the next one waits for so small a part more of tokens. So all events of a
#: completion together have at most about 33 times its tokens, and its first 64 tokens come as they are made.
_NEXT_EVENT: Final = 32


class SglangSamplingBody(SamplingBody, kw_only=True):
    max_new_tokens: Count = 128
    min_new_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    no_stop_trim: bool = False
    n: Completions = 1


class SglangBody(Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None  # ids, or lists of ids
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    model: str = ""
    stream: bool = False
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    rid: str = ""
    priority: Priority = 0
    weight_version: WeightVersionBody = WeightVersionBody()


class SglangDialect:
    """Reads and answers SGLang's requests."""

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(SglangBody, SGLANG_FIELDS.checked(body))
        checked = SGLANG_SAMPLING_FIELDS.checked(asked.sampling_params, inside="sampling_params")
        sampling = parsed_inside(SglangSamplingBody, checked, "sampling_params")
        sampling.min_tokens = sampling.min_new_tokens
        request = TextRequest(
            model=asked.model,
            prompts=_prompts(asked),
            sampling=sampling.sampling(),
            max_tokens=sampling.max_new_tokens,
            n=sampling.n,
            stop=sampling.stops("sampling_params.stop"),
            keep_stop=sampling.no_stop_trim,
            skip_special=sampling.skip_special_tokens,
            logprobs=asked.return_logprob,
            stream=asked.stream,
            priority=asked.priority,
            versions=asked.weight_version.wish(),
            request_id=asked.rid,
        )
        listed = sampling.n > 1 or isinstance(asked.text, list) or _is_batch(asked.input_ids)
        shape = msgspec.structs.replace(asked, text=None, input_ids=None)  # an answer outlives its prompts
        return AskedText(request, lambda context: SglangAnswer(shape, context, listed=listed))


class SglangAnswer(OpenAIAnswer):
    """The answer to one request: an object for each completion, in a list if there may be several."""

    def __init__(self, asked: SglangBody, context: AnswerContext, *, listed: bool) -> None:
        super().__init__(context, StreamOptions())
        self._asked, self._listed = asked, listed
        self._results: dict[int, ChoiceResult] = {}
        self._due: dict[int, int] = {}  # completion -> tokens with which its next event goes

    def events(self, delta: ChoiceDelta) -> bytes:
        """Each event has all of the completion so far, as SGLang's have. The more that is, the more tokens are new."""
        result = self._results.setdefault(delta.index, ChoiceResult(delta.index))
        result.add(delta)
        if delta.finish is None and result.count < self._due.get(delta.index, 0):
            return b""
        self._due[delta.index] = result.count + max(1, result.count // _NEXT_EVENT)
        return data_event(self._object(result) | ({"index": delta.index} if self._listed else {}))

    def whole(self, results: Sequence[ChoiceResult]) -> Any:
        made = [self._object(result) for result in results]
        return made if self._listed else made[0]

    def _object(self, result: ChoiceResult) -> dict[str, Any]:
        tokens, finish = result.tokens, result.finish
        prompt = self._context.played.prompt_of(result.index)
        tally = TokenTally([prompt])
        tally.add(tokens)
        meta: dict[str, Any] = {
            "id": self._context.request_id,
            "finish_reason": None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            **tally.stamps(),
        }
        if stamps := tally.stamps():
            meta["weight_version"] = str(stamps["weight_version_end"])
        if finish is not None:
            ended = {"type": finish.reason}
            meta["finish_reason"] = ended | ({"matched": finish.stop} if finish.stop is not None else {})
        ids = tokens["id"].tolist()
        if self._asked.return_logprob:
            name = self._context.token_text if self._asked.return_text_in_logprobs else lambda _token: None
            pairs = zip(logprobs_of(tokens), ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, name(token)] for logprob, token in pairs]
        return {"text": result.text, "output_ids": ids, "meta_info": meta}


class _OneList(Struct):
    input_ids: list[TokenId]


class _ManyLists(Struct):
    input_ids: list[list[TokenId]]


def _prompts(asked: SglangBody) -> list[Prompt]:
    if (asked.text is None) == (asked.input_ids is None):
        raise InvalidRequest("give text or input_ids, and not both", field="input_ids")
    if asked.text is not None:
        return [RawPrompt(text) for text in ([asked.text] if isinstance(asked.text, str) else asked.text)]
    if _is_batch(asked.input_ids):
        return [IdsPrompt(ids) for ids in parse(_ManyLists, {"input_ids": asked.input_ids}).input_ids]
    return [IdsPrompt(parse(_OneList, {"input_ids": asked.input_ids}).input_ids)]


def _is_batch(ids: list[Any] | None) -> bool:
    return ids is not None and ids != [] and isinstance(ids[0], list)
