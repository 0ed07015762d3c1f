"""Defines the records of the append stream: tokens sent to the store, and their acknowledgements."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES


class AppendDelta(NamedTuple):
    """Packed tokens of one attempt, from `offset` on."""

    ref: AttemptRef
    offset: int
    tokens: bytes
    finish: FinishReason | None = None  # on the attempt's last delta


class AppendAck(NamedTuple):
    """The store's answer to one delta."""

    attempt_id: str
    status: AppendStatus
    stored: int  # tokens of the attempt that the store keeps
    finished: bool  # the store keeps the attempt's finish, too
    message: int = 0  # the sender's number of the delta's message


class AppendColumns(NamedTuple):
    """Deltas of one run, in columns: entry i of each column belongs to delta i."""

    run_id: str
    rollouts: Sequence[str]
    attempts: Sequence[str]
    ends: Sequence[int]  # tokens of the rollout, with the delta's
    counts: Sequence[int]  # tokens of the delta
    tokens: bytes  # of all deltas, packed, in order
    finishes: Mapping[int, FinishReason]  # by delta, for those that finish their rollout
    numbers: Sequence[int] = ()  # of the attempts, on the stream that brought the deltas

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
            [self.numbers[i] for i in places] if self.numbers else (),
        )

    def superseded(self) -> dict[int, AppendAck]:
        """The answer to deltas whose attempts are over."""
        return {i: AppendAck(name, AppendStatus.SUPERSEDED, 0, False) for i, name in enumerate(self.attempts)}


def joined(several: Sequence[AppendColumns]) -> AppendColumns:
    """The deltas of several of one run, one after another; of several streams, so without their numbers."""
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
