"""Asks for Azure's Scheduled Events: what happens to this machine, and not before when.

The first answer may take two minutes, because the service starts with the first question. Events are not acknowledged:
that would bring them forward.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import aiohttp
import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.notices.metadata import MetadataAnswer, MetadataServer, Notice, parse_date

_HEADERS: Final = {"Metadata": "true"}
_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_FIRST_ANSWER_S: Final = 150.0
#: Events that take this process away, with Azure's notice of each.
_NOTICE_S: Final = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0, "Freeze": 900.0}
#: Longest freeze that is ignored: the machine comes back before its work would go on elsewhere.
_FREEZE_S: Final = 10.0

Text = Annotated[str, Meta(max_length=256)]


class ScheduledEvent(Struct, frozen=True, rename="pascal"):
    """One event, of this or another machine of its set."""

    event_id: Text
    event_type: Text
    event_status: Text = ""
    resources: tuple[str, ...] = ()
    not_before: Text = ""  # as in HTTP; empty once it has begun
    duration_in_seconds: float = -1  # of the standstill; -1: unknown

    @property
    def takes_away(self) -> bool:
        """Whether the event interrupts the machine for long."""
        return self.event_type in _NOTICE_S and (self.event_type != "Freeze" or self.duration_in_seconds > _FREEZE_S)

    def affects(self, name: str) -> bool:
        """Whether machine `name` is concerned."""
        return not name or not self.resources or name.casefold() in map(str.casefold, self.resources)


class ScheduledEventsDocument(Struct, frozen=True, rename="pascal"):
    events: tuple[ScheduledEvent, ...] = ()


class ScheduledEventsProbe:
    pause_s = 1.0

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._answered = False
        self._name = ""

    async def ask(self) -> Sequence[Notice]:
        answer = await self._server.ask("GET", _EVENTS, _HEADERS, timeout_s=10.0 if self._answered else _FIRST_ANSWER_S)
        events = msgspec.json.decode(answer.expect(200).body, type=ScheduledEventsDocument).events
        self._answered = True
        taking = [event for event in events if event.takes_away]
        if taking and not self._name:
            self._name = await self._own_name()
        return [_notice(event, answer) for event in taking if event.affects(self._name)]

    async def _own_name(self) -> str:
        """This machine's name; empty if the server does not tell: every event counts as this machine's then."""
        try:
            answer = (await self._server.ask("GET", _NAME, _HEADERS)).expect(200)
        except (Unavailable, TimeoutError, aiohttp.ClientError):
            return ""
        return answer.body.decode("utf-8", "replace").strip()


def _notice(event: ScheduledEvent, answer: MetadataAnswer) -> Notice:
    begun = event.event_status == "Started"
    standard_s = 0.0 if begun else _NOTICE_S[event.event_type]
    within_s = answer.seconds_until(parse_date(event.not_before), standard_s=standard_s)
    return Notice(within_s, f"azure: {event.event_type} {event.event_id}{' has begun' if begun else ''}")
