"""Stores the events that a run's watchers see. Events from which drivers and trainers recover are never trimmed."""

from collections.abc import Sequence
from typing import Final

import msgspec

from ebbtide.errors import NoCapacity
from ebbtide.store.link.store_faults import StoreRefused
from ebbtide.store.record_codec import json_object, pairs
from ebbtide.store.topics.topic import Topic
from ebbtide.types.run import LeaseRef, RunEvent
from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened

#: Events per page, which bounds the memory of one read.
PAGE: Final = 256
#: Bytes of an event that are reserved for other fields than its message.
_REST: Final = 1 << 10


class EventTopic(Topic):
    async def report(self, lease: LeaseRef, events: Sequence[RunEvent], *, quota_bytes: int) -> None:
        """Append a lease holder's events. Events whose kind and key exist already are dropped.

        Raises `NoCapacity` if the events that are never trimmed take more than the run's quota.
        """
        try:
            await self._leased("report", lease, quota_bytes, *_flat(events))
        except StoreRefused:
            text = f"the events of run {lease.run_id} fill its quota_bytes ({quota_bytes}); report less, or end the run"
            raise NoCapacity(text) from None

    async def note(self, run_id: str, event: RunEvent) -> None:
        """Append an event of the coordinator. Too long a message is cut."""
        event = msgspec.structs.replace(event, message=shortened(event.message, MAX_EVENT_BYTES - _REST))
        await self._write("report", run_id, "", "", "", *_flat([event]))

    async def page(self, run_id: str, cursor: str) -> list[RunEvent]:
        """Up to `PAGE` events after `cursor` (empty: from the first one), oldest first."""
        entries = await self._run("events_page", run_id, cursor or "0-0", PAGE)
        return [_event(cursor.decode(), fields) for cursor, fields in entries]


def _flat(events: Sequence[RunEvent]) -> list[str]:
    return [
        part
        for event in events
        for part in (event.kind, event.key, event.message, json_object(event.values), json_object(event.labels))
    ]


def _event(cursor: str, fields: list[bytes]) -> RunEvent:
    have = dict(pairs(fields))
    return RunEvent(
        cursor=cursor,
        kind=have[b"k"].decode(),
        key=have[b"key"].decode(),
        message=have[b"m"].decode(),
        values=msgspec.json.decode(have[b"v"], type=dict[str, float]),
        labels=msgspec.json.decode(have[b"l"], type=dict[str, str]),
        age_s=int(have[b"at"]) / 1000,
    )
