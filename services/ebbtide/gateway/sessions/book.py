"""Knows the turns of one session, plans the prompt of the next one, and writes its record.

A book is made from what the coordinator has: the records of turns, and the tokens of their rollouts. So any gateway
can make it again, and turns that another gateway added are read the same way.

Invariant: turns are added in the order of their numbers, each after the tokens that its prompt repeats. What is lost
with the process: nothing but the time to read the session again.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest, NotReady
from ebbtide.gateway.model import ServedModel, without_reasoning
from ebbtide.gateway.sessions.matching import (
    NO_HISTORY,
    EarlierAnswer,
    TextMatches,
    continued_ids,
    history_digests,
    message_digests,
    text_digest,
)
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix, TokenTree
from ebbtide.gateway.sessions.turns import PromptOrigin, TurnRecord, unpack_turn
from ebbtide.types.tokens import TOKEN, TokenArray, pack_ids, unpack_ids

_NO_TOKENS: Final[TokenArray] = np.empty(0, dtype=TOKEN)


class BookedTurn(Struct, frozen=True, kw_only=True):
    """A turn as it is stored."""

    number: int
    request_id: str
    rollout_ids: tuple[str, ...]
    record: TurnRecord


class PlannedTurn(Struct, frozen=True, kw_only=True):
    """A turn that can be added: its prompt, and the record from which any gateway makes the same prompt."""

    prompt_ids: list[int]
    record: TurnRecord


class SessionBook:
    """One session. Not to be shared between threads; planning a chat waits for the template's process."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.tree = TokenTree()
        self.turns: dict[int, BookedTurn] = {}
        #: Completions whose answers nobody got.
        self.undelivered: set[PathKey] = set()
        self._requests: dict[str, BookedTurn] = {}
        self._rollouts: dict[str, PathKey] = {}
        self._tokens: dict[PathKey, TokenArray] = {}
        #: Digest of a history -> the answer that it ends with; digest of an answer alone -> the last that said it.
        self._answers: dict[bytes, PathKey] = {}
        self._sayings: dict[bytes, PathKey] = {}
        self._said_by: dict[PathKey, set[bytes]] = {}

    @property
    def last(self) -> int:
        """Number of the last turn that is known; 0: none. Turns after it are to be read."""
        return max(self.turns, default=0)

    def turn_of(self, request_id: str) -> BookedTurn | None:
        """The turn of a request that is repeated."""
        return self._requests.get(request_id)

    def needed(self, record: bytes) -> str | None:
        """The rollout whose tokens are to be read before a turn with this record is added. Raises `Internal`."""
        prefix = unpack_turn(record).prefix
        if prefix.key is None:
            return None
        if (turn := self.turns.get(prefix.key.turn)) is None:
            raise NotReady(f"turn {prefix.key.turn} is not known: read the session's turns from the first on")
        return turn.rollout_ids[prefix.key.completion] if prefix.length > self.tree.length(prefix.key) else None

    def add(self, number: int, request_id: str, rollout_ids: Sequence[str], record: bytes) -> BookedTurn:
        """Adds a turn as the coordinator answered it. A known one changes nothing.

        Raises `NotReady` naming the rollout if tokens that the prompt repeats are not known, `Internal` for a record
        that cannot be read.
        """
        if number in self.turns:
            return self.turns[number]
        if (rollout := self.needed(record)) is not None:
            raise NotReady(f"tokens of rollout {rollout} are not known: read them before turn {number}")
        read = unpack_turn(record)
        turn = BookedTurn(number=number, request_id=request_id, rollout_ids=tuple(rollout_ids), record=read)
        self.tree.add_turn(number, read.prefix, unpack_ids(read.added), completions=len(turn.rollout_ids))
        self.turns[number] = self._requests[request_id] = turn
        self._rollouts |= {one: PathKey(number, index) for index, one in enumerate(turn.rollout_ids)}
        return turn

    def set_tokens(self, rollout_id: str, tokens: TokenArray, *, delivered: bool = True) -> None:
        """Takes the tokens that a rollout has so far: those that count, up to the one that completed a stop string.
        `delivered`: whether somebody got the answer, or may still get it.
        """
        key = self._rollouts[rollout_id]
        if not delivered:
            self.undelivered.add(key)
        if len(tokens) > len(self.tokens(key)):
            self._tokens[key] = tokens
            self.tree.set_sampled(key, tokens["id"])

    def set_answer(self, rollout_id: str, message: dict[str, Any]) -> None:
        """Takes a finished completion as its client got it, a message of the assistant: later prompts may repeat it.

        Where the whole response and the streamed one differ, both may be given. Many clients send no reasoning back,
        so the answer is known without it, too. Whether its tokens are repeated depends on its text alone.
        """
        key = self._rollouts[rollout_id]
        record = self.turns[key.turn].record
        try:
            sayings = dict.fromkeys(message_digests([message, without_reasoning(message)]))
        except InvalidRequest:  # a model can nest arguments too deeply: no prompt could repeat them
            return
        for said in sayings:
            self._sayings[said] = key
            self._said_by.setdefault(key, set()).add(said)
            if record.history:
                (history,) = history_digests([said], after=record.history)
                self._answers.setdefault(history, key)

    def tokens(self, key: PathKey) -> TokenArray:
        return self._tokens.get(key, _NO_TOKENS)

    def prompt_ids(self, number: int) -> list[int]:
        """The prompt of a turn, as it was submitted."""
        ids: list[int] = self.tree.prompt(number).tolist()
        return ids

    def plan_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        settings: bytes = b"",
    ) -> PlannedTurn:
        """Plans the turn of a chat request. Blocks some milliseconds. Raises what `ServedModel.render` raises.

        `settings` go into the record, which does not open them.
        """
        digests = message_digests(messages)
        histories = history_digests(digests)
        whole = self._model.render(messages, tools=tools, template_options=template_options)
        ids, origin = self._continued(histories, whole), PromptOrigin.CONTINUED
        if ids is None:
            ids, origin = self._after_text(whole, raw=False)
        prefix, unmatched, unknown = self._repeated(ids, messages, digests)
        history = histories[-1] if histories else NO_HISTORY
        counts = {"unmatched": unmatched, "unknown": unknown}
        return self._planned(ids, prefix, origin, text=whole, history=history, settings=settings, **counts)

    def plan_text(self, text: str, *, special: bool = True, settings: bytes = b"") -> PlannedTurn:
        """Plans the turn of a prompt without a template. `special`: a first prompt begins with special tokens.

        Raises `InvalidRequest` naming `prompt` for text that UTF-8 cannot hold.
        """
        ids, origin = self._after_text(text, raw=True, special=special)
        prefix = self.tree.longest_prefix(ids)
        return self._planned(ids, prefix, origin, text=text, raw=True, settings=settings)

    def plan_ids(self, ids: Sequence[int], *, settings: bytes = b"") -> PlannedTurn:
        """Plans the turn of a prompt of ids, which stay as they are."""
        prompt = [int(one) for one in ids]
        return self._planned(prompt, self.tree.longest_prefix(prompt), PromptOrigin.TOKENS, settings=settings)

    def _continued(self, histories: Sequence[bytes], whole: str) -> list[int] | None:
        """The ids behind the last answer of this session that the messages repeat, with all before it."""
        key = next((self._answers[one] for one in reversed(histories) if one in self._answers), None)
        if key is None:
            return None
        record = self.turns[key.turn].record
        answer = EarlierAnswer(
            prompt_ids=self.tree.prompt(key.turn).tolist(),
            sampled=self.tree.sampled(key).tolist(),
            text=record.text,
            text_bytes=record.text_bytes,
        )
        return continued_ids(answer, whole, self._model)

    def _after_text(self, text: str, *, raw: bool, special: bool = False) -> tuple[list[int], PromptOrigin]:
        records = {number: turn.record for number, turn in self.turns.items() if turn.record.raw == raw}
        try:
            prefix, rest = TextMatches(self.tree, records, self._model).longest(text, raw=raw)
        except UnicodeEncodeError:
            raise InvalidRequest("is no valid text in Unicode", field="prompt") from None
        if prefix.key is None:
            return self._model.encode(text, special=special), PromptOrigin.TOKENS
        ids = self.tree.prefix(prefix).tolist()
        return [*ids, *self._model.encode_following(rest, ids[-1])], PromptOrigin.TEXT

    def _repeated(
        self, ids: list[int], messages: list[dict[str, Any]], digests: Sequence[bytes]
    ) -> tuple[TokenPrefix, int, int]:
        """What the prompt repeats; how many tokens of known answers it has as text; and unknown answers."""
        prefix = self.tree.longest_prefix(ids)
        repeated: dict[bytes, list[int]] = {}
        for key, length in self.tree.chain(prefix):
            left = self.tree.length(key) - max(length, self.tree.prompt_length(key.turn))
            for said in self._said_by.get(key, ()):
                repeated.setdefault(said, []).append(left)
        unmatched, unknown = 0, 0
        for message, digest in zip(messages, digests, strict=True):
            if message.get("role") != "assistant":
                continue
            if repeated.get(digest):
                unmatched += repeated[digest].pop()
            elif digest in self._sayings:
                unmatched += len(self.tree.sampled(self._sayings[digest]))
            else:
                unknown += 1
        return prefix, unmatched, unknown

    def _planned(
        self, ids: list[int], prefix: TokenPrefix, origin: PromptOrigin, *, text: str = "", **fields: Any
    ) -> PlannedTurn:
        encoded = text.encode()
        record = TurnRecord(
            origin=origin if prefix.length else PromptOrigin.FIRST,
            added=pack_ids(ids[prefix.length :]),
            parent=prefix.key.turn if prefix.key else 0,
            completion=prefix.key.completion if prefix.key else 0,
            repeated=prefix.length,
            text_bytes=len(encoded),
            text=text_digest(encoded) if encoded else b"",
            **fields,
        )
        return PlannedTurn(prompt_ids=ids, record=record)
