"""Speaks /v1/completions."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.decode import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.dialects.dialect import (
    AnswerContext,
    AskedText,
    Completions,
    OpenAIAnswer,
    SharedBody,
    StreamOptions,
    TokenId,
    TokenName,
    finite,
    logprobs_of,
    stream_options,
    token_name,
    version_spans,
)
from ebbtide.gateway.dialects.fields import (
    COMPLETIONS_EACH,
    EBBTIDE,
    LABELS,
    MODEL,
    NOT_RECORDED,
    SAMPLING,
    STREAMED,
    TEXT_FORMAT,
    TEXT_ONLY,
    VLLM,
    RouteFields,
    neutral,
    refused,
    supported,
)
from ebbtide.gateway.request import IdsPrompt, Prompt, RawPrompt
from ebbtide.types.parse import parse
from ebbtide.types.rollout import MAX_ALTERNATIVES
from ebbtide.types.tokens import PromptScores, TokenArray

COMPLETION_FIELDS: Final = RouteFields(
    route="/v1/completions",
    rules={
        "model": MODEL,
        "prompt": supported("a string, a list of strings, token ids, or a list of lists of token ids"),
        "max_tokens": supported("default 16; with echo 0 or 1, with prompt_logprobs 1"),
        "n": COMPLETIONS_EACH,
        "stream": STREAMED,
        "stream_options": supported("include_usage, continuous_usage_stats"),
        "logprobs": supported(
            "0 or 1: the sampled token's, under the distribution that it was sampled from; with echo 0 to 20"
        ),
        "add_special_tokens": supported("default true"),
        "echo": supported("with logprobs, at most one token, and no stream: the prompt with its scores"),
        "best_of": neutral(1, why=NOT_RECORDED),
        "suffix": refused("the models complete, and do not insert"),
        "prompt_embeds": refused(TEXT_ONLY),
        "response_format": TEXT_FORMAT,
        **SAMPLING,
        "prompt_logprobs": supported(
            "0 to 20 alternatives to each token of the prompt; with max_tokens 1, and no stream"
        ),
        **VLLM,
        **LABELS,
        **EBBTIDE,
    },
)
#: Alternatives to each token of a scored prompt.
Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]


class CompletionBody(SharedBody, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 16
    n: Completions = 1
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    echo: bool = False
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False


class CompletionDialect:
    """Reads and answers completions of texts and of token ids."""

    def read(self, body: Mapping[str, Any]) -> AskedText:
        asked = parse(CompletionBody, COMPLETION_FIELDS.checked(body))
        options = stream_options(asked.stream_options, stream=asked.stream)
        prompts = _prompts(asked)
        request = asked.request(
            prompts,
            max_tokens=max(1, asked.max_tokens),
            n=asked.n,
            prompt_logprobs=_alternatives(asked),
            logprobs=asked.logprobs is not None,
        )
        shape = replace(asked, prompt="")  # an answer outlives its prompts, unless it shows their scores
        shown = () if request.prompt_logprobs is None else prompts
        return AskedText(request, lambda context: CompletionAnswer(shape, shown, context, options))


class _Ids(Struct):
    prompt: list[TokenId]


class _Texts(Struct):
    prompt: list[str]


class _ManyIds(Struct):
    prompt: list[list[TokenId]]


def _prompts(body: CompletionBody) -> list[Prompt]:
    """Raises `InvalidRequest` naming `prompt`."""
    if isinstance(body.prompt, str):
        return [RawPrompt(body.prompt, body.add_special_tokens)]
    if not body.prompt:
        raise InvalidRequest("is empty; give a text or token ids", field="prompt")
    first = body.prompt[0]
    if isinstance(first, int):
        return [IdsPrompt(parse(_Ids, {"prompt": body.prompt}).prompt)]
    if isinstance(first, str):
        return [RawPrompt(text, body.add_special_tokens) for text in parse(_Texts, {"prompt": body.prompt}).prompt]
    return [IdsPrompt(ids) for ids in parse(_ManyIds, {"prompt": body.prompt}).prompt]


def _alternatives(asked: CompletionBody) -> int | None:
    """Alternatives of each score; None: prompts are not scored. Raises `InvalidRequest` naming the field."""
    echo, logprobs, prompt_logprobs, max_tokens = asked.echo, asked.logprobs, asked.prompt_logprobs, asked.max_tokens
    if echo and logprobs is None:
        raise InvalidRequest("prompts are repeated with their scores only; set logprobs, or leave it out", field="echo")
    if echo and prompt_logprobs not in (None, logprobs):
        text = f"differs from logprobs ({logprobs}), which counts with echo; leave it out"
        raise InvalidRequest(text, field="prompt_logprobs")
    if echo and max_tokens > 1:
        text = "a request that repeats its prompt with scores samples at most one token; ask for one, or none"
        raise InvalidRequest(text, field="max_tokens")
    if not echo and max_tokens == 0:
        raise InvalidRequest("must be at least 1; only a prompt that is repeated may stand alone", field="max_tokens")
    if not echo and (logprobs or 0) > 1:
        text = "a stored token holds its own logprob alone; only 0 and 1 are accepted, but for echo"
        raise InvalidRequest(text, field="logprobs")
    return logprobs if echo else prompt_logprobs


class CompletionAnswer(OpenAIAnswer):
    """The answer to one request. `prompts`: those whose scores it shows."""

    def __init__(
        self, asked: CompletionBody, prompts: Sequence[Prompt], context: AnswerContext, options: StreamOptions
    ) -> None:
        super().__init__(context, options)
        self._asked, self._prompts = asked, prompts
        self._name = token_name(context.token_text, as_ids=asked.return_tokens_as_token_ids)
        self._offsets = [0] * context.played.completions
        self._begun: set[int] = set()

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta.tokens)
        choice = self._choice(delta.index, delta.text, delta.tokens, delta.finish)
        if delta.index in self._begun:
            choice.pop("prompt_token_ids", None)
        self._begun.add(delta.index)
        return self._event(choice, finished=delta.finish is not None)

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        choices = []
        for result in results:
            tokens = result.tokens if self._asked.max_tokens else result.tokens[:0]
            self._tally.add(tokens)
            choice = self._choice(result.index, result.text, tokens, result.finish)
            if result.scores is not None:
                self._add_scores(choice, result, result.scores)
            if self._asked.return_token_ids:
                choice["weight_versions"] = version_spans(tokens)
            choices.append(choice)
        return self._frame(choices) | {"usage": self._tally.usage()} | self._tally.stamps()

    def _add_scores(self, choice: dict[str, Any], result: ChoiceResult, scores: PromptScores) -> None:
        """Add what is known of a prompt, as `echo` and `prompt_logprobs` ask for it: many thousand scores, perhaps."""
        self._tally.add_versions(scores.version, scores.version)
        choice["prompt_logprobs"] = _prompt_logprobs(scores, self._context.token_text)
        if not self._asked.echo:
            return
        sampled = self._asked.max_tokens > 0
        prompt, ids = self._prompts[result.index], self._context.played.prompt_of(result.index)
        text = prompt.text if isinstance(prompt, RawPrompt) else self._context.decode(ids)
        choice["text"] = text + (result.text if sampled else "")
        choice["logprobs"] = _echoed_logprobs(ids, scores, self._name, sampled=sampled)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._context.request_id}",
            "object": "text_completion",
            "created": self._context.created,
            "model": self._context.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, tokens: TokenArray, finish: ChoiceFinish | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish.reason if finish else None,
            "stop_reason": finish.stop if finish else None,
        }
        if self._asked.logprobs is not None and not self._asked.echo:
            found = _sampled_logprobs(tokens, self._name, self._offsets[index], alone=self._asked.logprobs == 0)
            self._offsets[index] += sum(map(len, found["tokens"]))
            choice["logprobs"] = found
        if self._asked.return_token_ids:
            choice["token_ids"] = tokens["id"].tolist()
            choice["prompt_token_ids"] = self._context.played.prompt_of(index)
        return choice


def _sampled_logprobs(tokens: TokenArray, name: TokenName, offset: int, *, alone: bool) -> dict[str, Any]:
    """As /v1/completions has them. `offset`: characters of the completion's tokens before these. `alone`: no
    alternatives are asked for, where vLLM's `top_logprobs` have the sampled token; with some they would mislead."""
    names, logprobs = [name(token) for token in tokens["id"].tolist()], logprobs_of(tokens)
    top = [{one: logprob} for one, logprob in zip(names, logprobs, strict=True)] if alone else None
    offsets = []
    for one in names:
        offsets.append(offset)
        offset += len(one)
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _prompt_logprobs(scores: PromptScores, text: TokenName) -> list[dict[str, Any] | None]:
    """One entry for each token of the prompt, by id: of the token itself, and of the alternatives to it.

    The first is null, as nothing comes before it.
    """
    text = cache(text)  # texts of tokens cost the most

    def entry(token: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        return str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": text(token)}

    return [None, *(dict(entry(*one) for one in place) for place in _places(scores, -1))]


def _echoed_logprobs(prompt: Sequence[int], scores: PromptScores, name: TokenName, *, sampled: bool) -> dict[str, Any]:
    """As /v1/completions has them where it repeats the prompt. `sampled`: with the token behind it."""
    name = cache(name)
    places = _places(scores, None if sampled else -1)
    names, offsets, offset = [name(prompt[0]), *(name(place[0][0]) for place in places)], [], 0
    for one in names:
        offsets.append(offset)
        offset += len(one)
    return {
        "tokens": names,
        "token_logprobs": [None, *(finite(place[0][1]) for place in places)],
        "top_logprobs": [None, *({name(one[0]): finite(one[1]) for one in place} for place in places)],
        "text_offset": offsets,
    }


def _places(scores: PromptScores, end: int | None) -> list[list[tuple[int, float, int]]]:
    """Ids, logprobs and ranks of each place up to `end`: of the token, then of the alternatives."""
    places: list[list[tuple[int, float, int]]] = scores.places[:end].tolist()
    return places
