"""Serves calls of environment code, one at a time, inside the process that is made for it.

Nothing here is a secret, and nothing here is trusted: environment code may read and change all of this process.
"""

import socket
import struct
from typing import Any, Final

import msgspec
from msgspec import Struct

from ebbtide.environments import (
    Environment,
    EnvironmentSource,
    Split,
    StepResult,
    checked_result,
    load_source,
    reward_out_of_time,
)
from ebbtide.environments.session_verifiers import (
    Passage,
    PlayedBranch,
    VerifiedSession,
    Verifier,
    checked_reward,
    load_verifier,
)
from ebbtide.errors import InvalidRequest

# Defines what the driver and a process of environment code say to each other: frames of msgpack on a socket.
#
# Frames from the process are outside data: they are bounded, and checked when they are parsed.

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


#: Characters of an exception's text.
_EXCERPT = 2000


class EnvironmentHost:
    """Holds the source and the environments of the episodes that this process has."""

    def __init__(self) -> None:
        self._source: EnvironmentSource | None = None
        self._environments: dict[int, Environment] = {}
        self._verifier: Verifier | None = None

    def answer(self, call: HostCall) -> HostReply:
        """Carries a call out. Whatever the environment raises becomes a reply."""
        for episode in call.closed:
            self._environments.pop(episode, None)
        try:
            return self._do(call.request)
        except InvalidRequest as error:
            return HostReply(error=error.text, field=error.field)
        except MemoryError:
            return HostReply(error="MemoryError", exhausted=True)
        except BaseException as error:  # noqa: BLE001 - it fails its own episode alone
            return HostReply(error=_text(error))

    def _do(self, request: Request) -> HostReply:
        match request:
            case LoadSource(name, params, seed):
                self._source = load_source(name, msgspec.json.decode(params), seed)
                return HostReply(reward=reward_out_of_time(self._source))
            case OpenEpisode(episode, split, index):
                assert self._source is not None  # noqa: S101 - the driver loads first
                environment = self._source.make(split, index)
                opening = environment.reset()
                self._environments[episode] = environment
                return _reply(StepResult(tuple(opening)))
            case StepEpisode(episode, response):
                return _reply(checked_result(self._environments[episode].step(response)))
            case LoadVerifier(name):
                self._verifier = load_verifier(name)
                return HostReply()
            case VerifySession(branches, data):
                assert self._verifier is not None  # noqa: S101 - the driver loads first
                return HostReply(reward=checked_reward(self._verifier(_session(branches, data))))


def serve(connection: socket.socket) -> None:
    """Answers calls until the driver closes the connection."""
    host, decoder = EnvironmentHost(), msgspec.msgpack.Decoder(HostCall)
    with connection, connection.makefile("rb") as stream:
        while head := stream.read(LENGTH.size):
            (length,) = LENGTH.unpack(head)
            answer = frame(host.answer(decoder.decode(stream.read(length))))
            if len(answer) > MAX_FRAME:
                answer = frame(HostReply(error=f"the environment's answer has more than {MAX_FRAME} bytes"))
            connection.sendall(answer)


def _session(branches: tuple[BranchText, ...], data: bytes) -> VerifiedSession:
    return VerifiedSession(
        tuple(PlayedBranch(tuple(Passage(*one) for one in branch.passages), branch.truncated) for branch in branches),
        msgspec.json.decode(data),
    )


def _reply(result: StepResult) -> HostReply:
    return HostReply(
        messages=tuple((str(message.role), str(message.content)) for message in result.messages),
        reward=result.reward,
        done=result.done,
        info=dict(result.info),
    )


def _text(error: BaseException) -> str:
    try:
        text: Any = str(error)
    except Exception:  # noqa: BLE001 - user code
        text = "its text cannot be made"
    return f"{type(error).__name__}: {text}"[:_EXCERPT]
