"""Defines the append stream: tokens on their way to the store, their acknowledgements, and the messages of both.

Messages have columns. The sender numbers the attempts of a stream with their first delta, so that their three ids
travel once. An answer names only the deltas that were not stored as sent.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add
from typing import Final, NamedTuple

from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import AppendStatus, AttemptRef, check_attempt
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2, types_pb2


class AppendDelta(NamedTuple):
    """Packed tokens of one attempt, from `offset` on."""

    ref: AttemptRef
    offset: int
    tokens: bytes
    finish: FinishReason | None = None  # on the attempt's last delta


class AppendAck(NamedTuple):
    """The store's answer to one delta."""

    attempt_id: str
    status: AppendStatus
    stored: int  # tokens of the attempt that the store keeps
    finished: bool  # the store keeps the attempt's finish, too
    message: int = 0  # the sender's number of the delta's message


class AppendColumns(NamedTuple):
    """Deltas of one run, in columns: entry i of each column belongs to delta i."""

    run_id: str
    rollouts: Sequence[str]
    attempts: Sequence[str]
    ends: Sequence[int]  # tokens of the rollout, with the delta's
    counts: Sequence[int]  # tokens of the delta
    tokens: bytes  # of all deltas, packed, in order
    finishes: Mapping[int, FinishReason]  # by delta, for those that finish their rollout
    numbers: Sequence[int] = ()  # of the attempts, on the stream that brought the deltas

    def pick(self, places: Sequence[int]) -> "AppendColumns":
        """The deltas at these places, in this order."""
        pieces, at = [], 0
        for count in self.counts:
            pieces.append(self.tokens[at : at + count * TOKEN_BYTES])
            at += count * TOKEN_BYTES
        return AppendColumns(
            self.run_id,
            [self.rollouts[i] for i in places],
            [self.attempts[i] for i in places],
            [self.ends[i] for i in places],
            [self.counts[i] for i in places],
            b"".join(pieces[i] for i in places),
            {to: self.finishes[i] for to, i in enumerate(places) if i in self.finishes},
            [self.numbers[i] for i in places] if self.numbers else (),
        )

    def superseded(self) -> dict[int, AppendAck]:
        """The answer to deltas whose attempts are over."""
        return {i: AppendAck(name, AppendStatus.SUPERSEDED, 0, False) for i, name in enumerate(self.attempts)}


def joined(several: Sequence[AppendColumns]) -> AppendColumns:
    """The deltas of several of one run, one after another; of several streams, so without their numbers."""
    if len(several) == 1:
        return several[0]
    finishes: dict[int, FinishReason] = {}
    first = 0
    for one in several:
        if one.finishes:
            finishes |= {first + place: reason for place, reason in one.finishes.items()}
        first += len(one.rollouts)
    return AppendColumns(
        several[0].run_id,
        list(chain.from_iterable([one.rollouts for one in several])),
        list(chain.from_iterable([one.attempts for one in several])),
        list(chain.from_iterable([one.ends for one in several])),
        list(chain.from_iterable([one.counts for one in several])),
        b"".join([one.tokens for one in several]),
        finishes,
    )


#: Deltas per message, and numbers per stream: a script's arguments must fit on Lua's stack.
MAX_DELTAS: Final = 1024


class AppendSender:
    """Numbers the attempts of one stream. When all numbers are taken, it reuses the least recently used one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by attempt id, the most recently used at the end

    def request(self, sequence: int, deltas: Sequence[AppendDelta], *, session: str = "") -> fleet_pb2.AppendRequest:
        """One message of at most `MAX_DELTAS` deltas."""
        opened: list[fleet_pb2.Opened] = []
        numbers = [self._number(delta.ref, opened) for delta in deltas]
        return fleet_pb2.AppendRequest(
            session=session,
            sequence=sequence,
            opened=opened,
            numbers=numbers,
            offsets=[delta.offset for delta in deltas],
            counts=[len(delta.tokens) // TOKEN_BYTES for delta in deltas],
            tokens=b"".join(delta.tokens for delta in deltas),
            finishes=[
                fleet_pb2.Finish(index=index, reason=types_pb2.FinishReason.ValueType(delta.finish))
                for index, delta in enumerate(deltas)
                if delta.finish
            ],
        )

    def _number(self, ref: AttemptRef, opened: list[fleet_pb2.Opened]) -> int:
        number = self._numbers.pop(ref.attempt_id, None)
        if number is None:
            number = len(self._numbers)
            if number == MAX_DELTAS:
                number = self._numbers.pop(next(iter(self._numbers)))
            attempt = fleet_pb2.AttemptRef(run_id=ref.run_id, rollout_id=ref.rollout_id, attempt_id=ref.attempt_id)
            opened.append(fleet_pb2.Opened(number=number, attempt=attempt))
        self._numbers[ref.attempt_id] = number
        return number


class AppendReceiver:
    """Finds the attempts of one stream by their numbers."""

    def __init__(self) -> None:
        # By number; lists are faster than objects here.
        self._runs: list[str] = [""] * MAX_DELTAS
        self._rollouts: list[str] = [""] * MAX_DELTAS  # "": no attempt has the number
        self._attempts: list[str] = [""] * MAX_DELTAS
        self._held = Counter[str]()  # numbers by run

    def columns(self, request: fleet_pb2.AppendRequest) -> list[tuple[Sequence[int], AppendColumns]]:
        """The message's deltas by run, each run's with their places in the message. Raises `InvalidRequest` naming the
        column for an inconsistent message.
        """
        self._open(request.opened)
        numbers, counts, tokens = list(request.numbers), list(request.counts), request.tokens
        if len(numbers) > MAX_DELTAS:
            raise InvalidRequest(f"at most {MAX_DELTAS} deltas in one message", field="numbers")
        if not len(numbers) == len(request.offsets) == len(counts):
            raise InvalidRequest("all columns of a message must have one length", field="numbers")
        if sum(counts) * TOKEN_BYTES != len(tokens):
            raise InvalidRequest(f"{len(tokens)} bytes are not {sum(counts)} token records", field="tokens")
        if not numbers:
            return []
        if max(numbers) >= MAX_DELTAS or "" in (rollouts := list(map(self._rollouts.__getitem__, numbers))):
            index = next(i for i, number in enumerate(numbers) if number >= MAX_DELTAS or not self._rollouts[number])
            raise InvalidRequest("no attempt has this number", field=f"deltas[{index}].number")
        whole = AppendColumns(
            self._runs[numbers[0]],
            rollouts,
            list(map(self._attempts.__getitem__, numbers)),
            list(map(add, request.offsets, counts)),
            counts,
            tokens,
            finishes(request),
            numbers,
        )
        if len(self._held) == 1:
            return [(range(len(numbers)), whole)]
        places: dict[str, list[int]] = defaultdict(list)
        for place, number in enumerate(numbers):
            places[self._runs[number]].append(place)
        return [(mine, whole.pick(mine)._replace(run_id=run_id)) for run_id, mine in places.items()]

    def _open(self, opened: Sequence[fleet_pb2.Opened]) -> None:
        for index, one in enumerate(opened):
            if one.number >= MAX_DELTAS:
                raise InvalidRequest(f"must be below {MAX_DELTAS}", field=f"opened[{index}].number")
            ref = AttemptRef(one.attempt.run_id, one.attempt.rollout_id, one.attempt.attempt_id)
            check_attempt(ref, field=f"opened[{index}].attempt")
            if former := self._runs[one.number]:
                self._held -= Counter((former,))
            self._held[ref.run_id] += 1
            self._runs[one.number], self._rollouts[one.number] = ref.run_id, ref.rollout_id
            self._attempts[one.number] = ref.attempt_id


def finishes(request: fleet_pb2.AppendRequest) -> dict[int, FinishReason]:
    """Finish reasons by the index of their delta. Raises `InvalidRequest` for a reason that workers may not give."""
    if not request.finishes:
        return {}
    ends = {one.index: int(one.reason) for one in request.finishes}
    for index, reason in ends.items():
        if index >= len(request.numbers):
            raise InvalidRequest(f"there is no delta {index}", field="finishes")
        if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            raise InvalidRequest("a worker ends a rollout by STOP or LENGTH", field=f"deltas[{index}].finish")
    return {index: FinishReason(reason) for index, reason in ends.items()}


def acks(deltas: Sequence[AppendDelta], response: fleet_pb2.AppendResponse) -> list[AppendAck]:
    """Acknowledgements of all deltas of the message that `response` answers."""
    found = [_as_sent(delta, response.sequence) for delta in deltas]
    for other in response.others:
        attempt_id = deltas[other.index].ref.attempt_id
        status = AppendStatus(other.status)
        found[other.index] = AppendAck(attempt_id, status, other.stored, other.finished, response.sequence)
    return found


def _as_sent(delta: AppendDelta, message: int) -> AppendAck:
    end = delta.offset + len(delta.tokens) // TOKEN_BYTES
    return AppendAck(delta.ref.attempt_id, AppendStatus.STORED, end, delta.finish is not None, message)
