"""Defines a request for text in the gateway's own terms, whatever route it came by, and what follows from it alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest, NotReady, VersionUnavailable
from ebbtide.types.run import Run, Sampling

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_DIGEST_BYTES: Final = 16
#: A field of a rollout, as the coordinator names it.
_ROLLOUT_FIELD: Final = re.compile(r"rollouts\[(?P<number>\d+)\]\.(?:sampling\.)?(?P<name>\w+)")


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


def request_digest(request: TextRequest) -> bytes:
    """A digest of all that decides what a request gets. Its own ids are left out, and so is `fits_context`, which
    decides only whether it is taken.
    """
    asked = replace(request, request_id="", session_id="", group_id="", fits_context=msgspec.UNSET)
    return blake2b(_encoder.encode(asked), digest_size=_DIGEST_BYTES).digest()


def content_digest(request: TextRequest) -> bytes:
    """A digest of what decides the text of a request's completions, but for the encoded prompts, which the rollouts
    have. A repeat may differ in the rest: when it is generated, and whether it is streamed.
    """
    prompts = [_without_text(prompt) for prompt in request.prompts]
    return request_digest(replace(request, prompts=prompts, model="", stream=False, priority=0, versions=VersionWish()))


def _without_text(prompt: Prompt) -> Prompt:
    """A chat's tools and its options for the template decide how a completion is parsed."""
    return replace(prompt, messages=[]) if isinstance(prompt, ChatPrompt) else IdsPrompt([])


def session_episode(run_id: str, owner: str, session_id: str) -> str:
    """The coordinator's id of a session, whatever characters the parts have. A session's rollouts have it for their
    episode, by which its turns find the worker that has their prefix.
    """
    return f"s-{_digest(run_id, owner, session_id)}"


def session_group(run_id: str, owner: str, group_id: str) -> str:
    """The id of a client's group. Another owner's group of the same name is another one."""
    return f"g-{_digest(run_id, owner, group_id)}"


def _digest(*parts: str) -> str:
    """The encoding keeps the parts apart, and two sessions never meet by chance."""
    return blake2b(msgspec.msgpack.encode(parts), digest_size=_DIGEST_BYTES).hexdigest()


def is_satisfied(wish: VersionWish, run: Run) -> bool:
    """Whether workers can generate under the wish now or soon: they have the newest version, or are to get it."""
    newest = run.newest.version if run.newest else 0
    return newest >= max(1, wish.min_version) and wish.exact_version in (0, newest)


def unsatisfied(wish: VersionWish, run: Run) -> NotReady:
    """The error that says why. A `VersionUnavailable` concerns this wish alone."""
    if run.newest is None:
        return NotReady(f"run {run.run_id} has no policy version yet; try again once its trainer has published one")
    newest = run.newest.version
    if wish.exact_version and newest > wish.exact_version:
        return VersionUnavailable(
            f"weight_version.exact_version: run {run.run_id} has gone on to version {newest}, and no worker goes back "
            f"to {wish.exact_version}; ask for a newer one"
        )
    wanted = wish.exact_version or wish.min_version
    name = "exact_version" if wish.exact_version else "min_version"
    return VersionUnavailable(
        f"weight_version.{name}: the newest version of run {run.run_id} is {newest}, and {wanted} is not there yet; "
        "try again"
    )


def version_bounds(wish: VersionWish) -> tuple[int, int]:
    """The least and the highest version that may sample a token; 0: no bound."""
    return max(wish.min_version, wish.exact_version), wish.exact_version


def prompt_field(request: TextRequest, number: int) -> str:
    """The field that holds a prompt."""
    if isinstance(request.prompts[number], ChatPrompt):
        return "messages"
    return "prompt" if len(request.prompts) == 1 else f"prompt[{number}]"


@contextmanager
def named_as_asked(request: TextRequest) -> Iterator[None]:
    """Have what the coordinator refuses of a rollout name the client's field instead."""
    try:
        yield
    except InvalidRequest as error:
        match = _ROLLOUT_FIELD.fullmatch(error.field)
        if match is None:
            raise
        prompt = prompt_field(request, int(match["number"]) // request.n)
        raise InvalidRequest(error.text, field=prompt if match["name"] == "prompt_ids" else match["name"]) from None
