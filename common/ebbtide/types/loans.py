"""Defines the messages between a guard and the trainer that owns its device, and the guard's status."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.types.grants import Borrower, Forecast

#: Increased when the meaning of messages changes; guard and trainer of different versions refuse each other.
LOANS_VERSION: Final = 1


class OwnerWish(Struct, frozen=True, kw_only=True):
    """What the owner wants of its device, stated whole each time."""

    protocol_version: int
    run_id: Annotated[str, Meta(max_length=128)]
    owner: Annotated[str, Meta(min_length=1, max_length=128)]
    lease: Annotated[int, Meta(ge=0)] = 0
    sequence: Annotated[int, Meta(ge=0)] = 0
    lend: bool = False
    spell_s: Annotated[float, Meta(ge=0)] = 0.0  # how long the wish will probably stand; 0: unknown
    hand_over: bool = False  # of a wish to have the device: what its engines run is to go on elsewhere at once


class LoanState(Struct, frozen=True, kw_only=True):
    """What became of the wish with this number."""

    sequence: int
    compute_back: bool = False  # no engine steps, and none may begin
    memory_back: bool = False  # engines gave up what they were to give up
    waits_for: str = ""  # for people
    repeat_s: float = 0.0  # how often a state that stays the same is repeated; 0: never
    engine_bytes: int = 0  # of the device that an engine needs to come back; 0: none, or unknown


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """The guard's status. The fields are those of loans.proto."""

    state: str = ""
    run_id: str = ""
    lease: int = 0
    compute_back: bool = False
    memory_back: bool = False
    waits_for: str = ""
    borrowers: tuple[Borrower, ...] = ()
    forecast: Forecast = Forecast()
    held_s: float = 0.0
    lent_s: float = 0.0
    take_backs: int = 0
    uptime_s: float = 0.0
