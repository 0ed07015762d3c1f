"""Stores with a turn how its text is made of its tokens, so that any gateway knows the answer that a client got."""

from typing import Any, Final, Literal

import msgspec

from ebbtide.errors import Internal
from ebbtide.gateway.request import ChatPrompt, IdsPrompt, Prompt, RawPrompt, TextRequest, request_digest
from ebbtide.types.run import Sampling

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


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
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )

    def asked(self, tools: list[dict[str, Any]] | None) -> TextRequest:
        """A request whose completions become text as those of the stored one did. It has no prompt's content."""
        return TextRequest(
            prompts=[_empty_prompt(self, tools)],
            sampling=self.sampling,
            n=self.n,
            stop=self.stop,
            keep_stop=self.keep_stop,
            skip_special=self.skip_special,
            parse_tools=self.parse_tools,
            stream=self.stream,
        )


def turn_settings(request: TextRequest) -> TurnSettings:
    """The settings of a request with one prompt. They have its tools only if calls are parsed."""
    prompt = request.prompts[0]
    chat = prompt if isinstance(prompt, ChatPrompt) else None
    return TurnSettings(
        request=request_digest(request),
        prompt="chat" if chat else "text" if isinstance(prompt, RawPrompt) else "ids",
        n=request.n,
        stream=request.stream,
        stop=request.stop,
        keep_stop=request.keep_stop,
        skip_special=request.skip_special,
        parse_tools=request.parse_tools,
        stop_token_ids=request.sampling.stop_token_ids,
        ignore_eos=request.sampling.ignore_eos,
        min_tokens=request.sampling.min_tokens,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        min_p=request.sampling.min_p,
        repetition_penalty=request.sampling.repetition_penalty,
        template_options=chat.template_options if chat else {},
        tools=chat.tools if chat and request.parse_tools else None,
    )


def unpack_settings(data: bytes) -> TurnSettings:
    """Raises `Internal` if `data` is no stored settings."""
    try:
        return msgspec.msgpack.decode(data, type=TurnSettings)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Internal(f"a turn's stored settings cannot be read: {error}") from error


def _empty_prompt(settings: TurnSettings, tools: list[dict[str, Any]] | None) -> Prompt:
    match settings.prompt:
        case "chat":
            return ChatPrompt(messages=[], tools=tools, template_options=settings.template_options)
        case "text":
            return RawPrompt("")
        case "ids":
            return IdsPrompt([])
