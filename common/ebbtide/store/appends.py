"""The token path: one script call per message and run. Tokens go through unopened."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ebbtide.errors import LeaseSuperseded
from ebbtide.store.topic import Topic
from ebbtide.types.appends import Ack
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES


class Columns(Struct, frozen=True):
    """Deltas of one run: the i-th of each column make delta i, `counts[i]` tokens from token `offsets[i]` on.

    `tokens` are those of all, packed, one behind the other; `finishes`: how those that end their rollout end it.
    """

    attempts: Sequence[AttemptRef]
    offsets: Sequence[int]
    counts: Sequence[int]
    tokens: bytes
    finishes: Mapping[int, FinishReason]

    def pick(self, places: Sequence[int]) -> "Columns":
        """The deltas at these places, in their order."""
        pieces, at = [], 0
        for count in self.counts:
            pieces.append(self.tokens[at : at + count * TOKEN_BYTES])
            at += count * TOKEN_BYTES
        return Columns(
            [self.attempts[i] for i in places],
            [self.offsets[i] for i in places],
            [self.counts[i] for i in places],
            b"".join(pieces[i] for i in places),
            {to: self.finishes[i] for to, i in enumerate(places) if i in self.finishes},
        )


class Appends(Topic):
    async def append(self, run_id: str, deltas: Columns) -> dict[int, Ack]:
        """Store what follows on, acknowledge what is there, refuse gaps and old attempts. Safe to repeat.

        Returns, by their place, the deltas that were not stored as they were sent. Raises `NotFound`.
        """
        try:
            others = await self._write("append", run_id, *_arguments(deltas))
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return {i: Ack(ref.attempt_id, AppendStatus.SUPERSEDED, 0, False) for i, ref in enumerate(deltas.attempts)}
        return {
            place - 1: Ack(deltas.attempts[place - 1].attempt_id, AppendStatus(status), stored, bool(finished))
            for place, status, stored, finished in zip(*[iter(others)] * 4, strict=True)
        }


def _arguments(deltas: Columns) -> list[bytes | str | int]:
    """What the script compares and writes, spelt out here: strings are cheaper to make here than there."""
    parts: list[bytes | str | int] = [len(deltas.attempts)]
    tokens, at = deltas.tokens, 0
    for ref, offset, count in zip(deltas.attempts, deltas.offsets, deltas.counts, strict=True):
        end = at + count * TOKEN_BYTES
        attempt_id = ref.attempt_id
        parts += (ref.rollout_id, f"{attempt_id}:{offset}", f"{attempt_id}:{offset + count}", tokens[at:end])
        at = end
    for index, reason in deltas.finishes.items():
        parts += (index + 1, reason.name)
    return parts
