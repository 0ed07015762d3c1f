"""Defines what is new of one completion, and the completion as a whole."""

from typing import Any, Literal

import numpy as np
from msgspec import Struct

from ebbtide.gateway.text.output_parsers import ToolCallDelta
from ebbtide.types.prompt_scores import PromptScores
from ebbtide.types.tokens import TOKEN, TokenArray


class ChoiceFinish(Struct, frozen=True, kw_only=True):
    """How a completion ended. `stop`: the stop string or token; None for the end of a sequence."""

    reason: Literal["stop", "length"]
    stop: str | int | None = None


class ChoiceDelta(Struct, frozen=True, kw_only=True):
    """What is new of one completion. `tokens` are all that were sampled, those behind hidden text included."""

    index: int
    tokens: TokenArray
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: ChoiceFinish | None = None
    scores: PromptScores | None = None  # of the prompt, if they were asked for


class ChoiceResult:
    """Adds up the deltas of one completion."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: ChoiceFinish | None = None
        self.scores: PromptScores | None = None
        self.count = 0  # of tokens
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._tokens: list[TokenArray] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)
        self._tokens.append(delta.tokens)
        self.count += len(delta.tokens)
        for part in delta.tool_calls:
            while len(self._calls) <= part.index:
                self._calls.append({"id": "", "name": "", "arguments": ""})
            call = self._calls[part.index]
            call["id"] += part.call_id
            call["name"] += part.name
            call["arguments"] += part.arguments
        self.finish = delta.finish or self.finish
        self.scores = delta.scores or self.scores

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    @property
    def tokens(self) -> TokenArray:
        """Shape (n,)."""
        return np.concatenate(self._tokens) if self._tokens else np.empty(0, dtype=TOKEN)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls: id, name, arguments as a JSON text."""
        return self._calls
