"""Repeats prompts with their scores in the answers of /v1/completions, as `echo` and `prompt_logprobs` ask for it."""

from typing import Any

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.score_shapes import echoed_logprobs, prompt_logprobs
from ebbtide.gateway.dialects.token_shapes import TokenName
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
        choice["prompt_logprobs"] = prompt_logprobs(scores, self._context.token_text)
        if not self._echo:
            return
        ids = self._context.played.prompt_of(result.index)
        text = prompt.text if isinstance(prompt, RawPrompt) else self._context.decode(ids)
        choice["text"] = text + (result.text if self._sampled else "")
        choice["logprobs"] = echoed_logprobs(ids, scores, self._name, sampled=self._sampled)
