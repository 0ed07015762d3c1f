"""Azure's Scheduled Events: what will be done to this machine, and not before when.

The first answer may take two minutes, for the service starts with the first question. Events are not acknowledged:
that would only bring them forward.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import aiohttp
import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import Unavailable
from ebbtide.rollout_worker.notices import Notice
from ebbtide.rollout_worker.notices.metadata import MetadataAnswer, MetadataServer, parse_date

_HEADERS: Final = {"Metadata": "true"}
_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_FIRST_ANSWER_S: Final = 150.0
#: Events that take this process away, with the notice that Azure gives of each.
_NOTICE_S: Final = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0, "Freeze": 900.0}
#: A machine that is frozen for no longer comes back before its work would have found another place.
_FREEZE_S: Final = 10.0

Text = Annotated[str, Meta(max_length=256)]


class ScheduledEvent(Struct, frozen=True, rename="pascal"):
    """`not_before`: as in HTTP; empty once it has begun. `duration_in_seconds`: of the standstill; -1: unknown."""

    event_id: Text
    event_type: Text
    event_status: Text = ""
    resources: tuple[str, ...] = ()
    not_before: Text = ""
    duration_in_seconds: float = -1

    @property
    def takes_away(self) -> bool:
        """Whether the machine does not simply go on."""
        return self.event_type in _NOTICE_S and (self.event_type != "Freeze" or self.duration_in_seconds > _FREEZE_S)

    def affects(self, name: str) -> bool:
        """Whether machine `name` is meant: machines of one set learn of each other's events."""
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
        """This machine's name; empty if it cannot be had, and then every event is taken for ours."""
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
