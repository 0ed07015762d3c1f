"""Shapes what is known of sampled tokens: logprobs, versions and usage."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from ebbtide.gateway.generation.choice_delta import ChoiceDelta
from ebbtide.types.tokens import TokenArray

#: JSON has no infinities. OpenAI's routes say this for a probability of zero.
_LEAST_LOGPROB: Final = -9999.0
TokenName = Callable[[int], str]


def token_name(token_text: TokenName, *, as_ids: bool) -> TokenName:
    """How logprobs name a token: by its text, or as token_id:N."""
    return (lambda token: f"token_id:{token}") if as_ids else token_text


def logprobs_of(tokens: TokenArray) -> list[float]:
    return [finite(value) for value in tokens["logprob"].tolist()]


def completion_logprobs(tokens: TokenArray, name: TokenName, offset: int) -> dict[str, Any]:
    """As /v1/completions has them. `offset`: characters of the completion's tokens before these."""
    names = [name(token) for token in tokens["id"].tolist()]
    offsets = []
    for one in names:
        offsets.append(offset)
        offset += len(one)
    return {"tokens": names, "token_logprobs": logprobs_of(tokens), "top_logprobs": None, "text_offset": offsets}


def chat_logprobs(tokens: TokenArray, name: TokenName) -> dict[str, Any]:
    """As /v1/chat/completions has them."""
    pairs = zip(tokens["id"].tolist(), logprobs_of(tokens), strict=True)
    return {"content": [_chat_logprob(name(token), logprob) for token, logprob in pairs], "refusal": None}


def _chat_logprob(name: str, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode(errors="replace")), "top_logprobs": []}


def generate_logprobs(tokens: TokenArray) -> dict[str, Any]:
    """As /inference/v1/generate has them: `token_id` is vLLM's, and `token` is what the client of verifiers reads."""
    pairs = zip(tokens["id"].tolist(), logprobs_of(tokens), strict=True)
    return {"content": [_generate_logprob(token, logprob) for token, logprob in pairs]}


def _generate_logprob(token: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}


def version_spans(tokens: TokenArray) -> list[dict[str, Any]]:
    """The contiguous spans [start, end) of tokens that one version sampled."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(tokens["version"].tolist()):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": str(version), "start": place, "end": place + 1})
    return spans


class TokenTally:
    """Counts an answer's tokens, and notes the versions that sampled them."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self._lowest = self._highest = 0

    def add(self, delta: ChoiceDelta) -> None:
        self.add_tokens(delta.tokens)

    def add_tokens(self, tokens: TokenArray) -> None:
        if not len(tokens):
            return
        self.completion_tokens += len(tokens)
        self.add_versions(int(tokens["version"].min()), int(tokens["version"].max()))

    def add_versions(self, lowest: int, highest: int) -> None:
        """Note versions that made a part of the answer."""
        self._lowest = min(self._lowest or lowest, lowest)
        self._highest = max(self._highest, highest)

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def stamps(self) -> dict[str, int]:
        """The lowest and the highest version so far; nothing before the first token."""
        if not self._highest:
            return {}
        return {"weight_version_start": self._lowest, "weight_version_end": self._highest}


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)
