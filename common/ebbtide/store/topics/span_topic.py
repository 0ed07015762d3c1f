"""Reads a run's timeline, with one span per ended attempt. The script that ends an attempt writes its span."""

import struct
from typing import Final

from ebbtide.store.record_codec import pairs
from ebbtide.store.store_keys import run_key
from ebbtide.store.topics.topic import Topic
from ebbtide.types.run import AttemptSpan

#: Spans per page, which bounds the memory of one read.
PAGE: Final = 512


class SpanTopic(Topic):
    async def page(self, run_id: str, cursor: str, *, requests: bool = False) -> list[AttemptSpan]:
        """Up to `PAGE` spans after `cursor` (empty: from the first one kept), in the order of their ends. `requests`:
        those of gateways' requests, which have a stream and cursors of their own, instead of all others.
        """
        key = run_key(run_id, "REQUEST_SPANS" if requests else "SPANS")
        entries = await self._link.call("XRANGE", key, f"({cursor or '0-0'}", "+", "COUNT", PAGE)
        return [_span(entry.decode(), fields) for entry, fields in entries]


def _span(cursor: str, fields: list[bytes]) -> AttemptSpan:
    have = dict(pairs(fields))
    first_version, last_version = struct.unpack("<II", have[b"v"]) if have[b"v"] else (0, 0)
    group, episode, turn = have[b"o"].decode().split(" ") if have[b"o"] else ("", "", "0")
    return AttemptSpan(
        cursor=cursor,
        rollout_id=have[b"r"].decode(),
        attempt_id=have[b"a"].decode(),
        worker_id=have[b"w"].decode(),
        first=int(have[b"f"]),
        last=int(have[b"l"]),
        begin_s=int(have[b"b"]) / 1000,
        end_s=int(have[b"e"]) / 1000,
        end=have[b"why"].decode(),
        cause=int(have[b"c"]),
        first_version=first_version,
        last_version=last_version,
        group_id=group,
        episode_id=episode,
        turn=int(turn),
        evaluation=have.get(b"k") == b"eval",
        request=have.get(b"k") == b"request",
        prompt_tokens=int(have.get(b"p", 0)),
        step=int(have[b"s"]) if have.get(b"s") else None,
    )
