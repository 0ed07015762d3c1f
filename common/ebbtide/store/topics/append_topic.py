"""Appends tokens to rollouts by one script call per message and run, without decoding them."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from ebbtide.errors import LeaseSuperseded
from ebbtide.store.topics.topic import Topic
from ebbtide.types.append_delta import AppendAck
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES

_encode = msgspec.json.Encoder().encode


class AppendColumns(Struct, frozen=True):
    """Deltas of one run, in columns: entry i of each column belongs to delta i."""

    attempts: Sequence[AttemptRef]
    offsets: Sequence[int]  # the delta's first token in its rollout
    counts: Sequence[int]  # tokens
    tokens: bytes  # of all deltas, packed, in order
    finishes: Mapping[int, FinishReason]  # by delta, for those that finish their rollout

    def pick(self, places: Sequence[int]) -> "AppendColumns":
        """The deltas at these places, in this order."""
        pieces, at = [], 0
        for count in self.counts:
            pieces.append(self.tokens[at : at + count * TOKEN_BYTES])
            at += count * TOKEN_BYTES
        return AppendColumns(
            [self.attempts[i] for i in places],
            [self.offsets[i] for i in places],
            [self.counts[i] for i in places],
            b"".join(pieces[i] for i in places),
            {to: self.finishes[i] for to, i in enumerate(places) if i in self.finishes},
        )


def joined(several: Sequence[AppendColumns]) -> AppendColumns:
    """The deltas of several, one after another."""
    if len(several) == 1:
        return several[0]
    finishes: dict[int, FinishReason] = {}
    first = 0
    for one in several:
        finishes |= {first + place: reason for place, reason in one.finishes.items()}
        first += len(one.attempts)
    return AppendColumns(
        [ref for one in several for ref in one.attempts],
        [offset for one in several for offset in one.offsets],
        [count for one in several for count in one.counts],
        b"".join([one.tokens for one in several]),
        finishes,
    )


class AppendTopic(Topic):
    async def append(self, run_id: str, deltas: AppendColumns) -> dict[int, AppendAck]:
        """Store new tokens, acknowledge stored ones, refuse gaps and old attempts. Safe to repeat.

        Returns, by place, the acknowledgements of the deltas that were not stored as sent. Raises `NotFound`.
        """
        try:
            others = await self._write("append", run_id, *_arguments(deltas))
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return {
                i: AppendAck(ref.attempt_id, AppendStatus.SUPERSEDED, 0, False) for i, ref in enumerate(deltas.attempts)
            }
        return {
            place - 1: AppendAck(deltas.attempts[place - 1].attempt_id, AppendStatus(status), stored, bool(finished))
            for place, status, stored, finished in zip(*[iter(others)] * 4, strict=True)
        }


def _arguments(deltas: AppendColumns) -> tuple[bytes, bytes]:
    """The script's columns, and the tokens. The fences that it compares and writes are formatted here, which is cheaper
    than in Lua. A few large arguments are cheaper than many small ones on both sides.
    """
    attempts, offsets = deltas.attempts, deltas.offsets
    ends = [offset + count for offset, count in zip(offsets, deltas.counts, strict=True)]
    columns = (
        [ref.rollout_id for ref in attempts],
        [f"{ref.attempt_id}:{offset}" for ref, offset in zip(attempts, offsets, strict=True)],
        [f"{ref.attempt_id}:{end}" for ref, end in zip(attempts, ends, strict=True)],
        [count * TOKEN_BYTES for count in deltas.counts],
        [part for index, reason in deltas.finishes.items() for part in (index + 1, reason.name)],
    )
    return _encode(columns), deltas.tokens
