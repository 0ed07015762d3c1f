"""Collects what one worker is to get of its groups: the records of those rollouts that it does not make itself.

Invariant: of each sibling the worker got, or gets next, the records before `FedSibling.end`, each once and in order.
What does not continue there is not kept: the sibling is `late`, and its records are read from the store, from `end` on.
At most `most_bytes`, and one page of the store, wait. Nothing is lost with the process that matters: drafts are made of
these records, and a worker that opens another stream says how far it has each sibling.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from ebbtide.types.tokens import TOKEN_BYTES

#: Bytes that wait for one worker. A worker of 64 rollouts with seven siblings each, at 50 tokens a second, gets 270 KB
#: a second, and takes them with the answers to its own messages: several a second.
MOST_BYTES: Final = 512 << 10
#: Ended groups that are told again on the next stream.
_TOLD: Final = 256


class MadeAttempt(Protocol):
    """The attempt that makes a rollout's tokens. `session`: the worker's, while it makes them."""

    @property
    def session(self) -> object | None: ...


class Sibling:
    """A rollout of a group. `end`: tokens that are stored; `maker`: the session that made them last; `fed`: what each
    worker that follows it gets.
    """

    __slots__ = ("attempt", "end", "fed", "group", "maker", "rollout_id")

    def __init__(self, rollout_id: str, group: "SiblingGroup", end: int) -> None:
        self.rollout_id, self.group, self.end = rollout_id, group, end
        self.attempt: MadeAttempt | None = None
        self.maker: object | None = None
        self.fed: list[FedSibling] = []


class SiblingGroup:
    """The rollouts of one group that have tokens, and the feeds of the workers that make some of them now."""

    __slots__ = ("group_id", "members", "readers", "run_id")

    def __init__(self, run_id: str, group_id: str) -> None:
        self.run_id, self.group_id = run_id, group_id
        self.members: dict[str, Sibling] = {}
        self.readers: dict[object, SiblingFeed] = {}  # by session


class FedSibling:
    """What one worker gets of one sibling. Those in [`begin`, `end`) wait. `number`: on its stream; 0: none yet. `own`:
    the tokens that the worker made itself.
    """

    __slots__ = ("begin", "end", "feed", "number", "own", "pieces", "sibling")

    def __init__(self, feed: "SiblingFeed", sibling: Sibling, end: int, own: int = 0) -> None:
        self.feed, self.sibling, self.begin, self.end, self.number, self.own = feed, sibling, end, end, 0, own
        self.pieces: list[bytes] = []


class FedColumns(NamedTuple):
    """Records that go to one worker: the i-th of the first three belong together. `pieces`: the packed tokens, in
    order. `opened`: those whose numbers stand for them from now on.
    """

    numbers: list[int]
    offsets: list[int]
    counts: list[int]
    pieces: list[bytes]
    opened: list[FedSibling]


class SiblingFeed:
    def __init__(self, session: object, *, most_bytes: int = MOST_BYTES) -> None:
        self.session, self._most = session, most_bytes
        self._room = 0  # bytes that may wait: none without a stream
        self._held: dict[tuple[str, str], int] = {}  # what the worker said to have, by run and rollout
        self._made: dict[SiblingGroup, set[Sibling]] = {}  # what it makes, by group
        self._fed: dict[Sibling, FedSibling] = {}
        self._waiting: dict[FedSibling, None] = {}  # those with pieces
        self._late: dict[FedSibling, None] = {}
        self._ended: list[tuple[str, str]] = []  # run and group
        self._told: list[tuple[str, str]] = []  # of these, what the present stream was given
        self._numbers = self.bytes = self._streams = 0

    def open(self, held: Mapping[tuple[str, str], int]) -> int:
        """Begin a stream: what the one before was given may be lost. `held`: tokens of each sibling that the worker
        has, by run and rollout. Returns the stream's number, for `shut`.
        """
        self._held, self._room = dict(held), self._most
        self._streams += 1
        self._numbers = self.bytes = 0
        self._waiting.clear()
        for fed in self._fed.values():
            sibling = fed.sibling
            fed.begin = fed.end = max(fed.own, self._held.get((sibling.group.run_id, sibling.rollout_id), 0))
            fed.number, fed.pieces = 0, []
            if fed.end < sibling.end:
                self._late[fed] = None
            else:
                self._late.pop(fed, None)
        return self._streams

    def serves(self, stream: int) -> bool:
        """Whether no other stream has begun since: what an answer of a former one brings may be lost."""
        return stream == self._streams

    def shut(self, stream: int) -> None:
        """Keep nothing any more for a stream that is over, unless another one has begun."""
        if not self.serves(stream):
            return
        self._room = self.bytes = 0
        for fed in self._waiting:
            fed.end, fed.pieces = fed.begin, []
            self._late[fed] = None
        self._waiting.clear()

    def keep_only(self, groups: Iterable[tuple[str, str]]) -> None:
        """Of `groups` (run, group), which the worker has, end those of which it makes nothing; and again those whose
        end the stream before was given.
        """
        mine = {(group.run_id, group.group_id) for group in self._made}
        self._ended = [one for one in dict.fromkeys((*groups, *self._told)) if one not in mine]
        self._told = []

    def make(self, sibling: Sibling) -> None:
        """Note that the worker makes this rollout. Its group's others go to it from now on."""
        self.drop(sibling)
        group = sibling.group
        if (made := self._made.get(group)) is not None:
            made.add(sibling)
            return
        self._made[group] = {sibling}
        self._ended = [one for one in self._ended if one != (group.run_id, group.group_id)]
        group.readers[self.session] = self
        for other in group.members.values():
            if other is not sibling and not self._makes(other):
                self.follow(other)

    def made_until(self, sibling: Sibling) -> None:
        """Note that another worker goes on with a rollout that this one made so far."""
        if (made := self._made.get(sibling.group)) is None:
            return
        made.discard(sibling)
        if sibling not in self._fed:  # else it left the group since, and gets all of it
            self._keep(FedSibling(self, sibling, sibling.end, sibling.end))

    def push(self, fed: FedSibling, begin: int, end: int, tokens: bytes) -> None:
        """Take the records in [`begin`, `end`) of a sibling, which were just stored."""
        if fed.end != begin:
            if end <= fed.end:
                return  # the store was sent them again
            if begin > fed.end:
                self._late[fed] = None
                return
            tokens = tokens[(fed.end - begin) * TOKEN_BYTES :]
        if self.bytes + len(tokens) > self._room:
            self._late[fed] = None
            return
        if not fed.pieces:
            self._waiting[fed] = None
        fed.pieces.append(tokens)
        fed.end = end
        self.bytes += len(tokens)

    def next_late(self) -> FedSibling | None:
        """The sibling that is to be read from the store next, from its `end` on; None: none is, or there is no room."""
        return next(iter(self._late), None) if self.bytes < self._room else None

    def fill(self, fed: FedSibling, offset: int, tokens: bytes) -> None:
        """Take what the store has of a late sibling from `offset` on. Nothing: it has no more."""
        if self._fed.get(fed.sibling) is not fed:
            self._late.pop(fed, None)
            return
        if fed.end != offset or not self._room:
            return
        if tokens:
            if not fed.pieces:
                self._waiting[fed] = None
            fed.pieces.append(tokens)
            fed.end = offset + len(tokens) // TOKEN_BYTES
            self.bytes += len(tokens)
        if not tokens or fed.end >= fed.sibling.end:
            self._late.pop(fed, None)

    def take(self) -> FedColumns:
        """What waits, for the worker. Groups of which it makes nothing any more are left before."""
        self._leave_ended()
        waiting, self._waiting, self.bytes = self._waiting, {}, 0
        found = numbers, offsets, counts, pieces, opened = FedColumns([], [], [], [], [])
        for fed in waiting:
            if not fed.number:
                self._numbers += 1
                fed.number = self._numbers
                opened.append(fed)
            numbers.append(fed.number)
            offsets.append(fed.begin)
            counts.append(fed.end - fed.begin)
            pieces += fed.pieces
            fed.begin, fed.pieces = fed.end, []
        return found

    def take_ended(self) -> list[tuple[str, str]]:
        """Groups (run, group) that the worker need not keep, told once."""
        ended, self._ended = self._ended, []
        self._told = [*self._told, *ended][-_TOLD:] if ended else self._told
        return ended

    def drop(self, sibling: Sibling) -> None:
        """Give a sibling up: it is gone, or the worker makes it itself."""
        if (fed := self._fed.pop(sibling, None)) is not None:
            sibling.fed.remove(fed)
            self.bytes -= sum(map(len, fed.pieces))
            self._waiting.pop(fed, None)
            self._late.pop(fed, None)

    def close(self) -> None:
        """Leave all groups: the worker is gone."""
        for group in list(self._made):
            self.leave(group)

    def leave(self, group: SiblingGroup) -> None:
        """Have the worker get nothing more of a group."""
        del self._made[group]
        group.readers.pop(self.session, None)
        for sibling in group.members.values():
            self.drop(sibling)
            self._held.pop((group.run_id, sibling.rollout_id), None)
        self._ended.append((group.run_id, group.group_id))

    def _makes(self, sibling: Sibling) -> bool:
        return sibling.attempt is not None and sibling.attempt.session is self.session

    def _leave_ended(self) -> None:
        session = self.session
        for group, made in list(self._made.items()):
            for one in made:
                if one.attempt is not None and one.attempt.session is session:
                    break
            else:
                self.leave(group)

    def follow(self, sibling: Sibling) -> None:
        """Have the worker get a sibling of a group that it reads."""
        has = self._held.get((sibling.group.run_id, sibling.rollout_id), 0)
        fed = self._keep(FedSibling(self, sibling, has))
        if has < sibling.end:
            self._late[fed] = None

    def _keep(self, fed: FedSibling) -> FedSibling:
        self._fed[fed.sibling] = fed
        fed.sibling.fed.append(fed)
        return fed
