"""What gateways store of sessions and their turns at the coordinator: enough for any other gateway to go on.

A turn's record is stored before its rollouts are submitted. It holds no text and no sampled token: the new ids of the
prompt, digests by which later prompts find the turn, and how its text is made of its tokens, so that any gateway knows
the answer that a client got. The coordinator keeps records and never opens them.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Literal

import msgspec

from ebbtide.errors import Internal
from ebbtide.gateway.request import ChatPrompt, IdsPrompt, Prompt, RawPrompt, TextRequest, request_digest
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix
from ebbtide.types.run import Sampling
from ebbtide.types.session import Session


class PromptOrigin(IntEnum):
    """How a turn's prompt was matched to earlier ones."""

    FIRST = 1  # nothing of it was there before
    CONTINUED = 2  # an earlier answer, as it was sampled, and what follows it
    TEXT = 3  # the text of an earlier path, and what follows it
    TOKENS = 4  # encoded anew, or sent as ids; it shares the first tokens with an earlier path


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn. Fields are only ever added."""

    origin: PromptOrigin
    added: bytes
    """Packed ids of the prompt that the parent's path does not have."""
    parent: int = 0
    """Number of the turn whose path the prompt begins with; 0: none."""
    completion: int = 0
    """Which of its completions."""
    repeated: int = 0
    """How many ids of that path."""
    text_bytes: int = 0
    """Length of the prompt's text in UTF-8; 0 for prompts of ids."""
    text: bytes = b""
    """Digest of that text."""
    raw: bool = False
    """Whether the text was sent as it is, without messages."""
    history: bytes = b""
    """Digest of the messages, in order; empty if there were none."""
    unmatched: int = 0
    """Sampled tokens of answers that the client sent back, which the prompt has as newly encoded text."""
    unknown: int = 0
    """Messages of the assistant that no turn of this session answered."""
    settings: bytes = b""
    """What else the gateway must know to answer the request again. Not opened here."""

    @property
    def prefix(self) -> TokenPrefix:
        return TokenPrefix(PathKey(self.parent, self.completion) if self.parent else None, self.repeated)

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


def unpack_turn(record: bytes) -> TurnRecord:
    """Reads a stored record. Raises `Internal` if it is none."""
    try:
        return msgspec.msgpack.decode(record, type=TurnRecord)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Internal(f"a turn's stored record cannot be read: {error}") from error


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
#: What of a request decides the distribution of its tokens, and what else the text that is made of them.
_DISTRIBUTION: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos"),
)
_TEXT: Final = ("n", "stream", "stop", "keep_stop", "skip_special", "parse_tools")


class TurnSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway must know of a request beside its prompt. Fields are only ever added."""

    request: bytes
    """Digest of the request: another one under the same id is refused."""
    prompt: Literal["chat", "text", "ids"]
    n: int = 1
    stream: bool = False
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True
    parse_tools: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    template_options: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tools_of: int = 0
    """Number of the earlier turn that had the same tools; 0: they are here."""

    def packed(self) -> bytes:
        return _encoder.encode(self)

    @property
    def sampling(self) -> Sampling:
        """How its completions are sampled, but for their length."""
        return Sampling(**self.distribution())

    def distribution(self) -> dict[str, Any]:
        """What decides the distribution of its tokens, by the names of `Sampling`."""
        return _named(self, _DISTRIBUTION)

    def asked(self, tools: list[dict[str, Any]] | None) -> TextRequest:
        """A request whose completions become text as those of the stored one did. It has no prompt's content."""
        prompt = _empty_prompt(self, tools)
        return TextRequest(prompts=[prompt], sampling=self.sampling, **_named(self, _TEXT))


def turn_settings(request: TextRequest) -> TurnSettings:
    """The settings of a request with one prompt. They have its tools only if calls are parsed."""
    prompt = request.prompts[0]
    chat = prompt if isinstance(prompt, ChatPrompt) else None
    return TurnSettings(
        request=request_digest(request),
        prompt="chat" if chat else "text" if isinstance(prompt, RawPrompt) else "ids",
        template_options=chat.template_options if chat else {},
        tools=chat.tools if chat and request.parse_tools else None,
        **_named(request, _TEXT),
        **_named(request.sampling, _DISTRIBUTION),
    )


def unpack_settings(data: bytes) -> TurnSettings:
    """Raises `Internal` if `data` is no stored settings."""
    try:
        return msgspec.msgpack.decode(data, type=TurnSettings)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Internal(f"a turn's stored settings cannot be read: {error}") from error


def _named(record: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _empty_prompt(settings: TurnSettings, tools: list[dict[str, Any]] | None) -> Prompt:
    match settings.prompt:
        case "chat":
            return ChatPrompt(messages=[], tools=tools, template_options=settings.template_options)
        case "text":
            return RawPrompt("")
        case "ids":
            return IdsPrompt([])


class SessionNames(msgspec.Struct, frozen=True, kw_only=True):
    """A session's record: what its client calls it, and its group."""

    session: str
    group: str = ""
    reward: float | None = None  # with which it ended

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


def names_of(session: Session) -> SessionNames:
    """Raises `Internal` for a session of which this cannot read the record."""
    try:
        return msgspec.msgpack.decode(session.record, type=SessionNames)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Internal(f"the stored record of session {session.session_id} cannot be read: {error}") from error
