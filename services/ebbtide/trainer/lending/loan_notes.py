"""Defines the notes by which rank 0 states its wish to the ranks that lead other hosts, and by which these answer."""

from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.trainer.device_loan import DeviceProgress
from ebbtide.types.loans import OwnerWish

#: Wishes are numbered from here on, over all runs of a process.
FIRST: Final = 1


class SharedWish(Struct, frozen=True, kw_only=True):
    """What rank 0 wants of the devices of all hosts."""

    wish: OwnerWish | None = None  # None: it owns them no longer


class LeaderAnswer(Struct, frozen=True, kw_only=True):
    """What became of a wish on one host. `owner` and `sequence` are those of the wish."""

    owner: str = ""
    sequence: int = -1
    progress: DeviceProgress = DeviceProgress()
    engines: tuple[str, ...] = ()  # the workers whose engines run on the host's devices
    superseded: str = ""  # why a guard refused this trainer for good


def wish_name(number: int) -> str:
    return f"ebbtide/loans/wish/{number}"


def answer_name(rank: int) -> str:
    return f"ebbtide/loans/answer/{rank}"


def encode(note: SharedWish | LeaderAnswer) -> bytes:
    data: bytes = msgspec.msgpack.encode(note)
    return data


def decode_wish(data: bytes) -> OwnerWish | None:
    found: SharedWish = msgspec.msgpack.decode(data, type=SharedWish)
    return found.wish


def decode_answer(data: bytes) -> LeaderAnswer:
    found: LeaderAnswer = msgspec.msgpack.decode(data, type=LeaderAnswer)
    return found
