"""Decodes ids piece by piece for the two decoders of most language models, exactly as `tokenizers` decodes them whole.

**Byte level** (GPT-2, Llama 3, Qwen, DeepSeek): each character of a token stands for a byte. **Byte fallback** (Llama
2, Mistral, Gemma): a token is text, save that `<0x0A>` is a byte. A run of bytes is text only if all of it is valid
UTF-8, else each byte is U+FFFD; so the run is held until it ends.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ebbtide.gateway.text.detokenizer import PieceDecoder, WindowDetokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Ids of the prompt whose bytes may begin the response's first character.
_PRIMING: Final = 4


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


class _Kind:
    """What a decoder does: replacements of strings, byte fallback, spaces stripped from the start of a text."""

    def __init__(self, replaced: Sequence[tuple[str, str]] = (), *, fallback: bool = False, strip: int = 0) -> None:
        self.replaced, self.fallback, self.strip = tuple(replaced), fallback, strip


_BYTE_LEVEL: Final = _Kind()


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


@lru_cache(1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: bytes that print are themselves, and the others are the characters from U+0100 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [one for one in range(0x100) if one not in set(printing)]
    return {chr(one): one for one in printing} | {chr(0x100 + number): one for number, one in enumerate(others)}
