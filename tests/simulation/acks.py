"""Every acknowledgement that a coordinator hands out, held against the store as it is told.

It may not say that more is kept than is. As tokens in the store only ever grow (`Monitor`), what was acknowledged
rightly once is not lost later.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from ebbtide.types.fleet import AppendStatus
from ebbtide.v1 import fleet_pb2
from tests.simulation.loop import Proc
from tests.simulation.monitor import Monitor
from tests.simulation.plan import key_of

_REMEMBERED: Final = 64


class Sent(Struct):
    """One delta on its way: rollout (by `key_of`), the end of its tokens, and whether it ends the rollout."""

    name: str
    end: int
    finishes: bool


class Stream:
    def __init__(self) -> None:
        self.rollouts: dict[int, str] = {}
        self.messages: deque[tuple[int, list[Sent]]] = deque(maxlen=_REMEMBERED)
        self.answered: dict[int, list[Sent]] = {}  # by message, what was said of it


class Acks:
    """Listens to both streams of every worker."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._streams: dict[tuple[Proc, int], Stream] = {}
        self.told = 0
        self.on_beat: Callable[[Proc, fleet_pb2.Heartbeat], None] = lambda proc, beat: None

    def message(self, call: tuple[Proc, int], data: bytes, *, method: str, up: bool, current: bool) -> None:
        """One message of a worker's call; `up`: to the coordinator; `current`: from one that no other superseded."""
        if method.endswith("/Control"):
            if up:
                self._control(call[0], fleet_pb2.WorkerMessage.FromString(data))
            elif current:
                self._attached(fleet_pb2.CoordinatorMessage.FromString(data).attached)
        elif up:
            self._request(self._streams.setdefault(call, Stream()), fleet_pb2.AppendRequest.FromString(data))
        elif call in self._streams:
            self._response(self._streams[call], fleet_pb2.AppendResponse.FromString(data))

    def _control(self, proc: Proc, message: fleet_pb2.WorkerMessage) -> None:
        if message.HasField("heartbeat"):
            self.on_beat(proc, message.heartbeat)
        for ref in message.released.attempts:
            self._monitor.released(ref.attempt_id)

    def _attached(self, attached: fleet_pb2.Attached) -> None:
        """A worker is told which of its attempts go on: none whose rollout waits, or is somebody else's."""
        for ref in () if self._monitor.doubtful else attached.adopted:
            one = self._monitor.rollouts[key_of(ref.run_id, ref.rollout_id)]
            if one.state == "queued" or (one.state == "running" and one.attempt != ref.attempt_id):
                self._monitor.fail(f"{one.name} is {one.state}, and its old attempt {ref.attempt_id} may go on")

    def _request(self, stream: Stream, request: fleet_pb2.AppendRequest) -> None:
        for opened in request.opened:
            stream.rollouts[opened.number] = key_of(opened.attempt.run_id, opened.attempt.rollout_id)
        ends = {finish.index for finish in request.finishes}
        deltas = zip(request.numbers, request.offsets, request.counts, strict=True)
        sent = [
            Sent(stream.rollouts[number], offset + count, index in ends)
            for index, (number, offset, count) in enumerate(deltas)
        ]
        stream.messages.append((request.sequence, sent))

    def _response(self, stream: Stream, response: fleet_pb2.AppendResponse) -> None:
        if response.durable and response.sequence in stream.answered:
            self._durable(stream.answered.pop(response.sequence))
            return
        said = stream.answered[response.sequence] = self._answer(stream, response)
        if response.durable:
            self._durable(said)

    def _durable(self, said: list[Sent]) -> None:
        """What the store may not lose any more, whatever befalls it."""
        monitor = self._monitor
        for one in said:
            monitor.durable[one.name] = max(one.end, monitor.durable.get(one.name, 0))
            if one.finishes:
                monitor.ended.add(one.name)

    def _answer(self, stream: Stream, response: fleet_pb2.AppendResponse) -> list[Sent]:
        sent = next((deltas for sequence, deltas in stream.messages if sequence == response.sequence), [])
        others = {ack.index: ack for ack in response.others}
        said = []
        for index, delta in enumerate(sent):
            ack = others.get(index)
            if ack is None:
                said.append(delta)
            elif AppendStatus(ack.status) is not AppendStatus.SUPERSEDED:
                said.append(Sent(delta.name, ack.stored, ack.finished))
        for one in said:
            self._check(one.name, one.end, finished=one.finishes)
        return said

    def _check(self, name: str, stored: int, *, finished: bool) -> None:
        self.told += 1
        one = self._monitor.rollouts[name]
        if one.state in {"", "finished"} or self._monitor.doubtful:
            return  # checked as it finished, or dropped by the run
        if one.stored < stored:
            self._monitor.fail(f"{name} was acknowledged up to {stored}, the store has {one.stored}")
        if finished:
            self._monitor.fail(f"the end of {name} was acknowledged while it is {one.state}")
