"""Defines what the command and the process of one seed tell each other, as frames of msgpack behind their length."""

import struct
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.simulator.outcome import Outcome, SimulationProgress

_LENGTH: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _LENGTH.size


class SeedTask(Struct, frozen=True, kw_only=True):
    """What to simulate. Paths are as the user wrote them, for error messages; the process has the same directory."""

    scenario: str  # path of a scenario file; "": the recorded fleet
    recording: str = ""  # path of a recorded run, whose rollouts take the place of the scenario's; "": none
    seed: int = 0
    spans: bool = False  # whether the outcome is to have what each machine did: it is large


class Told(Struct, frozen=True, tag="progress"):
    progress: SimulationProgress


class Ended(Struct, frozen=True, tag="outcome"):
    outcome: Outcome


class Refused(Struct, frozen=True, tag="refusal"):
    """The input is at fault: `text` names the place and the remedy."""

    text: str


SeedMessage = Told | Ended | Refused
_decoder: msgspec.msgpack.Decoder[SeedMessage] = msgspec.msgpack.Decoder(SeedMessage)


def frame(message: SeedMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def length(head: bytes) -> int:
    """The bytes of the frame's body, from its first `HEAD_BYTES` bytes."""
    found: int = _LENGTH.unpack(head)[0]
    return found


def message(body: bytes) -> SeedMessage:
    return _decoder.decode(body)
