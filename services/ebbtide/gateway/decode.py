"""Turns the token chunks of a completion into deltas of its text. Pure.

Ids become characters as they come. Joined, the pieces are the text of all ids, exactly as `tokenizers` decodes them
whole, however they were cut. Most language models use one of two decoders, and for these no id is decoded twice.
**Byte level** (GPT-2, Llama 3, Qwen, DeepSeek): each character of a token stands for a byte. **Byte fallback** (Llama
2, Mistral, Gemma): a token is text, save that `<0x0A>` is a byte. A run of bytes is text only if all of it is valid
UTF-8, else each byte is U+FFFD; so the run is held until it ends. For any other decoder the tokenizer decodes a short
window again for each push (`WindowDetokenizer`).

A completion ends where its rollout ends, or with the token whose text completes a stop string. What came behind that
token is dropped: it is neither shown nor counted.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from msgspec import Struct

from ebbtide.gateway.parsers import OutputDelta, OutputParser, ToolCallDelta
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN, PromptScores, TokenArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Ids before a window that its first characters may depend on.
_CONTEXT: Final = 6
#: After as many ids without the end of a character, the text is taken to be invalid.
_LONGEST_WINDOW: Final = 64
_REPLACEMENT: Final = "\ufffd"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Ids of the prompt whose bytes may begin the response's first character.
_PRIMING: Final = 4


class PieceDecoder(Protocol):
    """Decodes a stream of ids. What it returned is final."""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that is complete with `ids`."""
        ...

    def end(self) -> str:
        """Returns the text of ids whose last character is incomplete. Nothing is pushed afterwards."""
        ...


class ByteLevelPieces:
    """Decodes byte-level tokens. Incomplete and invalid characters become U+FFFD as in one decoding of the whole."""

    def __init__(self, bytes_of: Callable[[int], bytes], priming: Sequence[int], skipped: frozenset[int]) -> None:
        self._bytes_of, self._skipped = bytes_of, skipped
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.push(priming)

    def push(self, ids: Sequence[int]) -> str:
        return self._characters.decode(b"".join(self._bytes_of(one) for one in ids if one not in self._skipped))

    def end(self) -> str:
        return self._characters.decode(b"", final=True)


@lru_cache(1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: bytes that print are themselves, and the others are the characters from U+0100 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [one for one in range(0x100) if one not in set(printing)]
    return {chr(one): one for one in printing} | {chr(0x100 + number): one for number, one in enumerate(others)}


class _Kind:
    """What a decoder does: replacements of strings, byte fallback, spaces stripped from the start of a text."""

    def __init__(self, replaced: Sequence[tuple[str, str]] = (), *, fallback: bool = False, strip: int = 0) -> None:
        self.replaced, self.fallback, self.strip = tuple(replaced), fallback, strip


class FallbackPieces:
    """Decodes tokens that are text or single bytes."""

    def __init__(
        self, token_of: Callable[[int], str | None], kind: _Kind, skipped: frozenset[int], *, strip: int
    ) -> None:
        self._token_of, self._kind, self._skipped, self._strip = token_of, kind, skipped, strip
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        return self._stripped("".join(self._piece(one) for one in ids if one not in self._skipped))

    def end(self) -> str:
        return self._stripped(self._ended_run())

    def _piece(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None:
            return ""
        for old, new in self._kind.replaced:
            token = token.replace(old, new)
        if self._kind.fallback and (found := _BYTE.fullmatch(token)):
            self._run.append(int(found[1], 16))
            return ""
        return self._ended_run() + token

    def _ended_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class WindowDetokenizer:
    """Decodes the last few ids again at each push, and returns what they add to the text of those before.

    Text is final once its last character is. A decoder that rewrites earlier text, such as one that joins punctuation
    to the word before, may put white space elsewhere than in one decoding of the whole.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt_ids: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids = [int(one) for one in prompt_ids[-_CONTEXT:]]
        #: So many characters of the window's text were returned, or are the prompt's.
        self._returned = len(self._decode())

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decode()
        complete = text.rstrip(_REPLACEMENT)
        if len(self._ids) > _LONGEST_WINDOW:
            complete = text
        made = complete[self._returned :]
        if complete == text:
            self._ids = self._ids[-_CONTEXT:]
            self._returned = len(self._decode())
        else:
            self._returned = max(self._returned, len(complete))
        return made

    def end(self) -> str:
        return self._decode()[self._returned :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


_BYTE_LEVEL: Final = _Kind()


class PieceDecoders:
    """Makes decoders for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(one for one, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._kind = _decoder_kind(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes_of: dict[int, bytes] = {}

    def decoder(self, prompt_ids: Sequence[int], *, skip_special: bool) -> PieceDecoder:
        """A decoder of what follows `prompt_ids`. With `skip_special`, special tokens have no text."""
        if self._kind is None:
            return WindowDetokenizer(self._tokenizer, prompt_ids, skip_special=skip_special)
        skipped = self._special if skip_special else frozenset()
        if self._kind == _BYTE_LEVEL:
            return ByteLevelPieces(self._token_bytes, [int(one) for one in prompt_ids[-_PRIMING:]], skipped)
        strip = 0 if len(prompt_ids) else self._kind.strip
        return FallbackPieces(self._tokenizer.id_to_token, self._kind, skipped, strip=strip)

    def _token_bytes(self, token_id: int) -> bytes:
        if (found := self._bytes_of.get(token_id)) is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            table = _byte_of_character()
            found = bytes(table[one] for one in token) if all(one in table for one in token) else token.encode()
            self._bytes_of[token_id] = found
        return found


def _decoder_kind(decoder: dict[str, Any] | None) -> _Kind | None:
    """What a tokenizer.json's decoder does, if it is one of those that are known here."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    if [one["type"] for one in steps] == ["ByteLevel"]:
        return _BYTE_LEVEL
    replaced, fallback, fused, strip = list[tuple[str, str]](), False, False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (fallback or fused):
                replaced.append((old, new))
            case {"type": "ByteFallback"} if not (fallback or fused):
                fallback = True
            case {"type": "Fuse"} if not fused:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and not strip:
                strip = start
            case _:
                return None
    return _Kind(replaced, fallback=fallback, strip=strip) if fused else None


class Detokenizer:
    """The text of one response. Not to be shared between threads."""

    def __init__(self, pieces: PieceDecoder, *, hidden_ends: Collection[int] = ()) -> None:
        """`hidden_ends`: ids that end a response. At its very end they have no text, wherever else they have theirs."""
        self._pieces = pieces
        self._ends = frozenset(hidden_ends)
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` complete: often that of `ids`, and never half a character."""
        count = len(ids)
        while count and int(ids[count - 1]) in self._ends:
            count -= 1
        if not count:
            self._held += [int(one) for one in ids]
            return ""
        text = self._pieces.push([*self._held, *(int(one) for one in ids[:count])])
        self._held = [int(one) for one in ids[count:]]
        return text

    def end(self) -> str:
        """Returns what is left: a character that never became complete, as U+FFFD."""
        return self._pieces.end()


class StopStrings:
    """Watches the text of one response. What it finds does not depend on how the text was cut.

    The stop string that is complete first ends the text; of several that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: without empty ones, which would end every text at once."""
        self._stops = [one for one in stops if one]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that may be shown, and the stop string that was met, which is not shown.

        Nothing is pushed afterwards if one was met.
        """
        self._held += text
        if met := self._met():
            start, stop = met
            shown, self._held = self._held[:start], ""
            return shown, stop
        shown = self._held[: self._certain()]
        self._held = self._held[len(shown) :]
        return shown, None

    def end(self) -> str:
        """Returns what was held back: the response ended, and it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _met(self) -> tuple[int, str] | None:
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _certain(self) -> int:
        """How many characters cannot be the start of a stop string."""
        return min((self._start_of(stop) for stop in self._stops), default=len(self._held))

    def _start_of(self, stop: str) -> int:
        at = max(0, len(self._held) - len(stop) + 1)
        while (at := self._held.find(stop[0], at)) >= 0:
            if stop.startswith(self._held[at:]):
                return at
            at += 1
        return len(self._held)


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


class ChoiceText:
    """One completion. `finished` is set by the delta that ends it."""

    def __init__(
        self,
        index: int,
        decoder: Detokenizer,
        *,
        stops: StopStrings | None = None,
        parser: OutputParser | None = None,
        whole: bool = False,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        keep_stop: bool = False,
    ) -> None:
        """`whole`: parse the text at its end. `stop_ids`: the client's stop tokens. `min_tokens`: within so many tokens
        no stop string counts.
        """
        self._index, self._decoder, self._stops, self._parser = index, decoder, stops, parser
        self._stop_ids, self._min_tokens, self._keep_stop = frozenset(stop_ids), min_tokens, keep_stop
        self._unparsed: list[str] | None = [] if whole and parser is not None else None
        self._ids: list[int] = []  # of the unparsed text
        self._decoded = 0
        self._last = -1
        self.finished = False
        self.stopped_early = False  # at a stop string, so that the rollout may still run

    def may_parse_whole(self, reason: FinishReason | None) -> bool:
        """Whether a chunk with this reason may end the completion, so that `push` parses all of its text."""
        return self._unparsed is not None and (reason is not None or self._stops is not None)

    def push(self, tokens: TokenArray, reason: FinishReason | None) -> ChoiceDelta:
        """The delta of a chunk, which may be empty. `reason`: STOP or LENGTH with the last chunk."""
        ids: list[int] = tokens["id"].tolist()
        self._last = ids[-1] if ids else self._last
        used, text, met = self._search(ids)
        finish = None
        if met is not None:
            tokens, finish = tokens[:used], ChoiceFinish(reason="stop", stop=met)
            self.stopped_early = True
        elif reason is not None:
            text, finish = text + self._rest(), self._finish(reason)
        self.finished = finish is not None
        return self._delta(tokens, text, finish)

    def _search(self, ids: list[int]) -> tuple[int, str, str | None]:
        """How many tokens count, their text, and the stop string that the last of them completes."""
        early = max(0, min(len(ids), self._min_tokens - self._decoded))
        self._decoded += len(ids)
        if self._stops is None:
            return len(ids), self._decoder.push(ids), None
        texts = [self._decoder.push(ids[:early])] if early else []
        for number, token in enumerate(ids[early:], early + 1):
            text, met = self._stops.push(self._decoder.push((token,)))
            texts.append(text)
            if met is not None:
                texts.append(met if self._keep_stop else "")
                return number, "".join(texts), met
        return len(ids), "".join(texts), None

    def _rest(self) -> str:
        text = self._decoder.end()
        if self._stops is None:
            return text
        shown, met = self._stops.push(text)
        return shown + (self._stops.end() if met is None else "")

    def _finish(self, reason: FinishReason) -> ChoiceFinish:
        if reason is FinishReason.LENGTH:
            return ChoiceFinish(reason="length")
        return ChoiceFinish(reason="stop", stop=self._last if self._last in self._stop_ids else None)

    def _delta(self, tokens: TokenArray, text: str, finish: ChoiceFinish | None) -> ChoiceDelta:
        parts = self._parsed(text, tokens["id"].tolist(), ends=finish is not None)
        return ChoiceDelta(
            index=self._index,
            tokens=tokens,
            text="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
            finish=finish,
        )

    def _parsed(self, text: str, ids: list[int], *, ends: bool) -> list[OutputDelta]:
        if self._parser is None:
            return [OutputDelta(content=text)]
        if self._unparsed is None:
            pushed = self._parser.push(text, ids)
            return [pushed, self._parser.end()] if ends else [pushed]
        self._unparsed.append(text)
        self._ids += ids
        return [self._parser.whole("".join(self._unparsed), self._ids)] if ends else []
