"""Defines what a gateway stores of a turn before its rollouts are submitted: enough for any other to submit the same.

The coordinator keeps records and never opens them. They hold no text and no sampled token: the new ids of the prompt,
and digests by which later prompts find the turn.
"""

from enum import IntEnum

import msgspec

from ebbtide.errors import Internal
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix


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
