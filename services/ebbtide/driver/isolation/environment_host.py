"""Serves calls of environment code, one at a time, inside the process that is made for it.

Nothing here is a secret, and nothing here is trusted: environment code may read and change all of this process.
"""

import socket
from typing import Any

import msgspec

from ebbtide.driver.isolation.host_messages import (
    LENGTH,
    MAX_FRAME,
    BranchText,
    HostCall,
    HostReply,
    LoadSource,
    LoadVerifier,
    OpenEpisode,
    Request,
    StepEpisode,
    VerifySession,
    frame,
)
from ebbtide.environments import (
    Environment,
    EnvironmentSource,
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
            return HostReply(error=str(error), field=error.field)
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
