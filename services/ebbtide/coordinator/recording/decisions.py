"""Defines the records of what a round decides by itself: its messages to workers. Placements have `BatchPlaced`."""

from typing import TypeAlias

from msgspec import Struct


class RunServed(Struct, frozen=True, tag=True):
    """A worker is to serve another run; "": none."""

    session: str
    run: str


class InstallSent(Struct, frozen=True, tag=True):
    session: str
    run: str
    version: int
    restart: bool  # the worker's engine has to be restarted for it


class MoveAsked(Struct, frozen=True, tag=True):
    """A rollout is to go to another worker."""

    attempt: int  # serial number, as in `AttemptMade`
    worker: str


class AskedBack(Struct, frozen=True, tag=True):
    """A worker is to hand rollouts back on account of itself."""

    session: str
    attempts: tuple[str, ...]
    reason: str


class BorrowTold(Struct, frozen=True, tag=True):
    """A borrowed worker learns whether its host is borrowed."""

    session: str
    wanted: bool


Decision: TypeAlias = RunServed | InstallSent | MoveAsked | AskedBack | BorrowTold
