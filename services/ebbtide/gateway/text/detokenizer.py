"""Turns sampled ids into text as they come. Joined, the pieces are the text of all ids, however they were cut.

Most language models use one of two decoders (`piece_decoders`), and for these no piece is decoded twice. For any other
decoder the tokenizer decodes a short window again for each push (`WindowDetokenizer`).
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Ids before a window that its first characters may depend on.
_CONTEXT: Final = 6
#: After as many ids without the end of a character, the text is taken to be invalid.
_LONGEST_WINDOW: Final = 64
_REPLACEMENT: Final = "\ufffd"


class PieceDecoder(Protocol):
    """Decodes a stream of ids. What it returned is final."""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that is complete with `ids`."""
        ...

    def end(self) -> str:
        """Returns the text of ids whose last character is incomplete. Nothing is pushed afterwards."""
        ...


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
