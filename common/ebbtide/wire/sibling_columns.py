"""Converts between siblings' records and the columns in which they ride in an answer of the append stream."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ebbtide.errors import InvalidRequest
from ebbtide.scheduling.long_tail.feeds.sibling_feed import FedColumns
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2

#: Siblings that a worker may say to have. One of 512 rollouts in groups of eight has 3,584.
MOST_HELD: Final = 1 << 14
#: Run and group.
GroupName = tuple[str, str]


class SiblingDelta(NamedTuple):
    """Packed tokens of one sibling, from `offset` on."""

    group: GroupName
    rollout_id: str
    offset: int
    tokens: bytes


def fill_siblings(message: fleet_pb2.Siblings, columns: FedColumns, ended: Iterable[GroupName]) -> None:
    """Fill in what goes to one worker, and the groups that it need not keep."""
    for fed in columns.opened:
        group = fed.sibling.group
        name = _group((group.run_id, group.group_id))
        message.opened.add(number=fed.number, group=name, rollout_id=fed.sibling.rollout_id)
    message.numbers.extend(columns.numbers)
    message.offsets.extend(columns.offsets)
    message.counts.extend(columns.counts)
    message.tokens = b"".join(columns.pieces)
    message.ended.extend(map(_group, ended))


def _group(name: GroupName) -> fleet_pb2.SiblingGroup:
    return fleet_pb2.SiblingGroup(run_id=name[0], group_id=name[1])


class SiblingReceiver:
    """Finds the siblings of one stream by their numbers."""

    def __init__(self) -> None:
        self._siblings: dict[int, tuple[GroupName, str]] = {}  # group and rollout

    def ended(self, message: fleet_pb2.Siblings) -> list[GroupName]:
        """The groups that are over, whose numbers go; read them before `deltas`."""
        ended = [(one.run_id, one.group_id) for one in message.ended]
        if ended:
            over = set(ended)
            self._siblings = {number: one for number, one in self._siblings.items() if one[0] not in over}
        return ended

    def deltas(self, message: fleet_pb2.Siblings) -> list[SiblingDelta]:
        """The message's records. Raises `InvalidRequest` for an inconsistent message."""
        for one in message.opened:
            self._siblings[one.number] = (one.group.run_id, one.group.group_id), one.rollout_id
        if not len(message.numbers) == len(message.offsets) == len(message.counts):
            raise InvalidRequest("all columns of a message must have one length", field="siblings.numbers")
        if sum(message.counts) * TOKEN_BYTES != len(message.tokens):
            raise InvalidRequest("not as many token records as the counts say", field="siblings.tokens")
        found, at = [], 0
        for number, offset, count in zip(message.numbers, message.offsets, message.counts, strict=True):
            begin, at = at, at + count * TOKEN_BYTES
            if number not in self._siblings:
                raise InvalidRequest(f"no sibling has the number {number}", field="siblings.numbers")
            group, rollout_id = self._siblings[number]
            found.append(SiblingDelta(group, rollout_id, offset, message.tokens[begin:at]))
        return found


def held_messages(held: Mapping[GroupName, Mapping[str, int]]) -> list[fleet_pb2.HeldSiblings]:
    """What a worker says to have: tokens by group and rollout."""
    return [
        fleet_pb2.HeldSiblings(group=_group(name), rollout_ids=list(ends), ends=list(ends.values()))
        for name, ends in held.items()
    ]


def held_siblings(messages: Sequence[fleet_pb2.HeldSiblings]) -> dict[GroupName, dict[str, int]]:
    """What a worker said to have. Raises `InvalidRequest` for too much, or for columns of unequal lengths."""
    if sum(len(one.rollout_ids) for one in messages) + len(messages) > MOST_HELD:
        raise InvalidRequest(f"at most {MOST_HELD} siblings and groups", field="siblings")
    held: dict[GroupName, dict[str, int]] = {}
    for one in messages:
        if len(one.rollout_ids) != len(one.ends):
            raise InvalidRequest("all columns of a message must have one length", field="siblings")
        held[one.group.run_id, one.group.group_id] = dict(zip(one.rollout_ids, one.ends, strict=True))
    return held
