"""Appends tokens to rollouts by one script call per message and run, without decoding them."""

import msgspec

from ebbtide.errors import LeaseSuperseded
from ebbtide.store.topics.topic import Topic
from ebbtide.types.append_delta import AppendAck, AppendColumns
from ebbtide.types.fleet import AppendStatus

_encode = msgspec.json.Encoder().encode


class AppendTopic(Topic):
    async def append(self, deltas: AppendColumns, *, new: bool = False) -> dict[int, AppendAck]:
        """Store new tokens, acknowledge stored ones, refuse gaps and old attempts. Safe to repeat. It costs less
        if they are `new`: all are expected to follow what is stored.

        Returns, by place, the acknowledgements of the deltas that were not stored as sent. Raises `NotFound`.
        """
        # A few large arguments are cheaper than many small ones on both sides.
        finishes = [part for index, reason in deltas.finishes.items() for part in (index + 1, reason.name)]
        columns = _encode((deltas.rollouts, deltas.attempts, deltas.ends, deltas.counts, finishes, new))
        try:
            others = await self._write("append", deltas.run_id, columns, deltas.tokens)
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return deltas.superseded()
        return {
            place - 1: AppendAck(deltas.attempts[place - 1], AppendStatus(status), stored, bool(finished))
            for place, status, stored, finished in zip(*[iter(others)] * 4, strict=True)
        }
