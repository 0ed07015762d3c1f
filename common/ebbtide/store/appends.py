"""The token path: one script call per message and run. Tokens go through unopened."""

from collections.abc import Sequence

from msgspec import Struct

from ebbtide.errors import LeaseSuperseded
from ebbtide.store.topic import Topic
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.rollout import FinishReason


class Delta(Struct, frozen=True):
    """Packed `tokens` of one attempt from token `offset` on; `finish` with the last ones."""

    rollout_id: str
    attempt_id: str
    offset: int
    tokens: bytes
    finish: FinishReason | None = None


class Ack(Struct, frozen=True):
    """`stored` tokens are kept; `finished`: so is the end."""

    status: AppendStatus
    stored: int
    finished: bool


_SUPERSEDED = Ack(AppendStatus.SUPERSEDED, 0, False)


class Appends(Topic):
    async def append(self, run_id: str, deltas: Sequence[Delta]) -> list[Ack]:
        """Store what follows on, acknowledge what is there, refuse gaps and old attempts. Safe to repeat. Raises
        `NotFound`.
        """
        parts: list[bytes | str | int] = []
        for delta in deltas:
            finish = delta.finish.name if delta.finish else ""
            parts += (delta.rollout_id, delta.attempt_id, delta.offset, delta.tokens, finish)
        try:
            found = await self._write("append", run_id, *parts)
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return [_SUPERSEDED] * len(deltas)
        return [Ack(AppendStatus(status), stored, bool(finished)) for status, stored, finished in found]
