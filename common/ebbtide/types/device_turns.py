"""Says who has a trainer's devices from when to when, by events of its run.

A trainer that lends its devices reports each change as an event of the kind `device`. Its label `state` is that of the
turn that begins. Its values are in seconds: `ago_s` from the change to the report, and `return_s` from the take-back
until the devices were the trainer's. Events have the time of their arrival, so a report that arrives late puts its
change later. A trainer that is dead reports nothing: its last turn lasts until the next trainer's first one.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from ebbtide.types.run import RunEvent

DEVICE: Final = "device"
#: Engines may compute; the trainer waits for an engine's step, or for memory; the trainer has the devices.
LENT, RETURNING, HELD = "lent", "returning", "held"


class DeviceTurn(Struct, frozen=True):
    """Who has a trainer's devices from when to when, in seconds since the run's submission."""

    state: str  # LENT, RETURNING or HELD
    begin_s: float
    end_s: float


def device_event(state: str, *, key: str, ago_s: float, return_s: float = 0.0) -> RunEvent:
    """Makes the event of a turn that began `ago_s` before: LENT, or HELD after a wait of `return_s`."""
    message = "the trainer lends its devices" if state == LENT else "the trainer has its devices"
    values = {"ago_s": max(0.0, ago_s), "return_s": max(0.0, return_s)}
    return RunEvent(kind=DEVICE, key=key, message=message, values=values, labels={"state": state})


def device_turns(events: Iterable[RunEvent], until_s: float) -> list[DeviceTurn]:
    """Returns the turns of a run up to `until_s`, in order and without gaps; none if its trainer lends nothing."""
    begins = sorted(
        (begin for event in events if event.kind == DEVICE for begin in _begins(event)), key=lambda one: one[0]
    )
    ends = [begin for begin, _ in begins[1:]] + [max(until_s, begins[-1][0])] if begins else []
    found: list[DeviceTurn] = []
    for (begin_s, state), end_s in zip(begins, ends, strict=True):
        if found and found[-1].state == state:
            found[-1] = DeviceTurn(state, found[-1].begin_s, end_s)
        elif end_s > begin_s:
            found.append(DeviceTurn(state, begin_s, end_s))
    return found


def _begins(event: RunEvent) -> Iterator[tuple[float, str]]:
    """Yields the beginnings of turns that an event tells."""
    at_s, wait_s = max(0.0, event.age_s - event.values.get("ago_s", 0.0)), event.values.get("return_s", 0.0)
    if event.labels.get("state") == HELD and wait_s > 0:
        yield max(0.0, at_s - wait_s), RETURNING
    if (state := event.labels.get("state", "")) in (LENT, HELD):
        yield at_s, state
