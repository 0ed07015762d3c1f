"""Defines what the driver and a process of environment code say to each other: frames of msgpack on a socket.

Frames from the process are outside data: they are bounded, and checked when they are parsed.
"""

import struct
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.environments import Split

#: Bytes of one frame; a longer one ends the process.
MAX_FRAME: Final = 16 << 20
LENGTH: Final = struct.Struct("<I")


class HostPlan(Struct, frozen=True, kw_only=True):
    """Says how a process of environment code is made. It travels as an argument, so it holds no secret."""

    isolated: bool
    user: str = ""  # that it becomes, which takes root; empty: it stays this user, in a user namespace
    readable: tuple[str, ...] = ()  # absolute paths
    paths: tuple[str, ...] = ()  # folders that environments import from, before all others
    secrets: tuple[str, ...] = ()  # absolute paths of files that it must not be able to read
    network: bool = False
    memory_bytes: int
    nice: int = 0  # added to the driver's: of two that want a CPU, the lower one goes first


class HostStarted(Struct, frozen=True, kw_only=True):
    """The first frame of a process."""

    refused: str = ""  # why the host does not allow the isolation; empty: it is in place
    open_network: bool = False  # it has this host's network, though its plan has none: this host allows no namespaces


class LoadSource(Struct, frozen=True, tag="load"):
    name: str
    params: bytes  # as JSON, whose integers have no bounds
    seed: int


class OpenEpisode(Struct, frozen=True, tag="open"):
    """Makes an environment and resets it."""

    episode: int
    split: Split
    index: int


class StepEpisode(Struct, frozen=True, tag="step"):
    episode: int
    response: str


class LoadVerifier(Struct, frozen=True, tag="load_verifier"):
    name: str


class BranchText(Struct, frozen=True):
    """A branch of a session."""

    passages: tuple[tuple[str, bool], ...]  # text, and whether it was sampled
    truncated: bool


class VerifySession(Struct, frozen=True, tag="verify"):
    branches: tuple[BranchText, ...]
    data: bytes  # a JSON object


Request = LoadSource | OpenEpisode | StepEpisode | LoadVerifier | VerifySession


class HostCall(Struct, frozen=True):
    request: Request
    closed: tuple[int, ...] = ()  # episodes that are over


class HostReply(Struct, frozen=True, kw_only=True):
    """The answer to a call: what the environment gave, or why it failed."""

    error: str = ""
    field: str | None = None  # of an `InvalidRequest`
    exhausted: bool = False  # it ran out of memory, so the process should go
    messages: tuple[tuple[str, str], ...] = ()  # role and content
    reward: float | None = None
    done: bool = False
    info: dict[str, float] = {}


def frame(message: Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
