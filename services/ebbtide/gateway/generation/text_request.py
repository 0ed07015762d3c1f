"""Defines a request for text in the gateway's own terms, whatever route it came by."""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.types.run import Sampling


class IdsPrompt(Struct, frozen=True):
    """A prompt that the client has encoded."""

    ids: list[int]


class RawPrompt(Struct, frozen=True):
    """A text without a template. `special`: the tokenizer adds its special tokens."""

    text: str
    special: bool = True


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """Messages for the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}
    generate: bool = True  # open the assistant's turn
    special: bool = False


Prompt = IdsPrompt | RawPrompt | ChatPrompt


class VersionWish(Struct, frozen=True, kw_only=True):
    """The policy versions that may generate a request; 0: no bound."""

    min_version: int = 0
    exact_version: int = 0


class TextRequest(Struct, frozen=True, kw_only=True):
    """What a client asks for. `sampling.max_tokens` counts only if `max_tokens` is set."""

    prompts: list[Prompt]
    sampling: Sampling
    model: str = ""
    max_tokens: int | None = None  # None: what the context leaves
    fits_context: bool = False  # where the context leaves less than `max_tokens`, that counts
    n: int = 1  # completions of each prompt
    prompt_logprobs: int | None = None  # alternatives of each score; None: prompts are not scored
    score_from: int = 0  # always: digests of requests that are under way while gateways are replaced have it
    stop: tuple[str, ...] = ()
    keep_stop: bool = False  # the text ends with the stop string or token
    skip_special: bool = True  # the text is without special tokens
    parse_tools: bool = False  # find tool calls in the text
    logprobs: bool = False  # the answer shows those of its tokens
    stream: bool = False
    priority: int = 0
    versions: VersionWish = VersionWish()
    request_id: str = ""  # the client's; empty: it gave none
    session_id: str = ""
    group_id: str = ""  # of the session, the client's; empty: it gave none

    @property
    def returns(self) -> bool:
        """Whether the client can come back for what was generated after it left. A session alone names no request."""
        return bool(self.request_id)

    def without_prompts(self) -> "TextRequest":
        """The request with empty prompts of the same kinds: their encoded ids are all that is needed of them later."""
        return replace(self, prompts=[_emptied(prompt) for prompt in self.prompts])


def _emptied(prompt: Prompt) -> Prompt:
    match prompt:
        case IdsPrompt():
            return IdsPrompt([])
        case RawPrompt():
            return RawPrompt("")
        case ChatPrompt():
            return ChatPrompt(messages=[])
