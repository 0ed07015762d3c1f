"""Shows the scores of prompts in the answers of /v1/completions, as `echo` and `prompt_logprobs` ask for it.

A prompt may have many thousand scores: shape them in a thread.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.token_shapes import TokenName, finite
from ebbtide.gateway.generation.choice_delta import ChoiceResult
from ebbtide.gateway.generation.text_request import Prompt, RawPrompt
from ebbtide.types.prompt_scores import PromptScores


def asked_alternatives(*, echo: bool, logprobs: int | None, prompt_logprobs: int | None, max_tokens: int) -> int | None:
    """Alternatives of each score; None: prompts are not scored. Raises `InvalidRequest` naming the field."""
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


class ScoredChoice:
    """Adds what is known of a prompt to its choice."""

    def __init__(self, context: AnswerContext, name: TokenName, *, echo: bool, sampled: bool) -> None:
        """`name`: of tokens in `logprobs`. `echo`: repeat the prompt; `sampled`: and show the token behind it."""
        self._context, self._name, self._echo, self._sampled = context, name, echo, sampled

    def add(self, choice: dict[str, Any], result: ChoiceResult, scores: PromptScores, prompt: Prompt) -> None:
        choice["prompt_logprobs"] = _prompt_logprobs(scores, self._context.token_text)
        if not self._echo:
            return
        ids = self._context.played.prompt_of(result.index)
        text = prompt.text if isinstance(prompt, RawPrompt) else self._context.decode(ids)
        choice["text"] = text + (result.text if self._sampled else "")
        choice["logprobs"] = _echoed_logprobs(ids, scores, self._name, sampled=self._sampled)


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
