"""Appends tokens to rollouts by one script call per message and run, without decoding them."""

from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
from msgspec import Struct

from ebbtide.errors import LeaseSuperseded
from ebbtide.store.topics.topic import Topic
from ebbtide.types.append_delta import AppendAck
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES

_encode = msgspec.json.Encoder().encode


class AppendColumns(Struct, frozen=True):
    """Deltas of one run, in columns: entry i of each column belongs to delta i."""

    run_id: str
    rollouts: Sequence[str]
    attempts: Sequence[str]
    ends: Sequence[int]  # tokens of the rollout, with the delta's
    counts: Sequence[int]  # tokens of the delta
    tokens: bytes  # of all deltas, packed, in order
    finishes: Mapping[int, FinishReason]  # by delta, for those that finish their rollout

    def pick(self, places: Sequence[int]) -> "AppendColumns":
        """The deltas at these places, in this order."""
        pieces, at = [], 0
        for count in self.counts:
            pieces.append(self.tokens[at : at + count * TOKEN_BYTES])
            at += count * TOKEN_BYTES
        return AppendColumns(
            self.run_id,
            [self.rollouts[i] for i in places],
            [self.attempts[i] for i in places],
            [self.ends[i] for i in places],
            [self.counts[i] for i in places],
            b"".join(pieces[i] for i in places),
            {to: self.finishes[i] for to, i in enumerate(places) if i in self.finishes},
        )

    def superseded(self) -> dict[int, AppendAck]:
        """The answer to deltas whose attempts are over."""
        return {i: AppendAck(name, AppendStatus.SUPERSEDED, 0, False) for i, name in enumerate(self.attempts)}


def joined(several: Sequence[AppendColumns]) -> AppendColumns:
    """The deltas of several of one run, one after another."""
    if len(several) == 1:
        return several[0]
    finishes: dict[int, FinishReason] = {}
    first = 0
    for one in several:
        if one.finishes:
            finishes |= {first + place: reason for place, reason in one.finishes.items()}
        first += len(one.rollouts)
    return AppendColumns(
        several[0].run_id,
        list(chain.from_iterable([one.rollouts for one in several])),
        list(chain.from_iterable([one.attempts for one in several])),
        list(chain.from_iterable([one.ends for one in several])),
        list(chain.from_iterable([one.counts for one in several])),
        b"".join([one.tokens for one in several]),
        finishes,
    )


class AppendTopic(Topic):
    async def append(self, deltas: AppendColumns) -> dict[int, AppendAck]:
        """Store new tokens, acknowledge stored ones, refuse gaps and old attempts. Safe to repeat.

        Returns, by place, the acknowledgements of the deltas that were not stored as sent. Raises `NotFound`.
        """
        # A few large arguments are cheaper than many small ones on both sides.
        finishes = [part for index, reason in deltas.finishes.items() for part in (index + 1, reason.name)]
        columns = _encode((deltas.rollouts, deltas.attempts, deltas.ends, deltas.counts, finishes))
        try:
            others = await self._write("append", deltas.run_id, columns, deltas.tokens)
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return deltas.superseded()
        return {
            place - 1: AppendAck(deltas.attempts[place - 1], AppendStatus(status), stored, bool(finished))
            for place, status, stored, finished in zip(*[iter(others)] * 4, strict=True)
        }
