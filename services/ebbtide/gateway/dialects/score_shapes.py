"""Shapes the scores of prompts: as vLLM's routes name them, and as OpenAI's repeat a prompt with them.

A prompt may have many thousand scores: call these in a thread.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from ebbtide.gateway.dialects.token_shapes import TokenName, finite
from ebbtide.gateway.generation.choice_delta import ChoiceResult
from ebbtide.types.prompt_scores import PromptScores


def prompt_logprobs(scores: PromptScores, text: TokenName) -> list[dict[str, Any] | None]:
    """One entry for each token of the prompt, by id: of the token itself, and of the alternatives to it.

    The first is null, as nothing comes before it.
    """
    text = cache(text)  # texts of tokens cost the most

    def entry(token: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        return str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": text(token)}

    return [None, *(dict(entry(*one) for one in place) for place in _places(scores, -1))]


def scored_prompt(results: Sequence[ChoiceResult], text: TokenName) -> dict[str, Any]:
    """What vLLM adds to the answer of a route with one prompt, if that was scored."""
    scores = results[0].scores
    return {} if scores is None else {"prompt_logprobs": prompt_logprobs(scores, text)}


def echoed_logprobs(prompt: Sequence[int], scores: PromptScores, name: TokenName, *, sampled: bool) -> dict[str, Any]:
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


def input_logprobs(
    prompt: Sequence[int], scores: PromptScores, text: TokenName | None, *, start: int, alternatives: int, sampled: bool
) -> dict[str, Any]:
    """As SGLang's meta_info has them, of the prompt's tokens from `start` on: it has null for the first of them.
    `sampled`: with the alternatives to the sampled token.
    """
    name = cache(text) if text is not None else (lambda _token: None)

    def shown(token: int, logprob: float | None) -> list[Any]:
        return [None if logprob is None else finite(logprob), token, name(token)]

    places, last = _places(scores, -1)[start:], scores.places[-1].tolist()
    tokens = [shown(prompt[start], None), *(shown(*place[0][:2]) for place in places)]
    if not alternatives:
        return {"input_token_logprobs": tokens}
    return {
        "input_token_logprobs": tokens,
        "input_top_logprobs": [None, *([shown(*one[:2]) for one in place[1:]] for place in places)],
        "output_top_logprobs": [[shown(*one[:2]) for one in last[1:]]] if sampled else [],
    }


def _places(scores: PromptScores, end: int | None) -> list[list[tuple[int, float, int]]]:
    """Ids, logprobs and ranks of each place up to `end`: of the token, then of the alternatives."""
    places: list[list[tuple[int, float, int]]] = scores.places[:end].tolist()
    return places
