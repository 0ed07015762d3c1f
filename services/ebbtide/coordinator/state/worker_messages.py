"""Defines what workers are told on the control stream, as records, and keeps what is still to be sent.

`api/fleet.py` makes messages of the protos of them, by field name; simulated workers take them as they are.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.types.fleet import AttemptRef, FlushPace
from ebbtide.types.run import Sampling
from ebbtide.types.weights import PolicyVersion


class Assignment(Struct, frozen=True, kw_only=True, gc=False):
    """A rollout that the worker generates from now on."""

    attempt: AttemptRef
    policy: str
    prompt_ids: bytes
    partial: bytes  # the tokens stored so far
    sampling: Sampling  # of the whole rollout
    min_version: int
    max_version: int
    priority: int
    interactive: bool
    prompt_logprobs: int | None
    episode_id: str
    group_id: str  # whose tokens serve drafts of it; else empty
    expected_tokens: int  # still to come; 0: not known
    longest_tokens: int  # as this, and not exceeded with a probability of 0.8
    max_model_len: int  # tokens of prompt and response at which it ends; 0: as the worker's engine does


class AssignBatch(Struct, frozen=True):
    assignments: tuple[Assignment, ...]
    ended: tuple[str, ...] = ()  # episodes that are over: what is cached of them may go first


class CancelBatch(Struct, frozen=True):
    """Drop attempts that are over, or another worker's."""

    attempts: tuple[AttemptRef, ...]


class ReleaseReason(StrEnum):
    """Why a worker is asked to hand attempts back. The texts are for people, and come back with what it hands over."""

    BALANCE = ""  # the step ends sooner with them elsewhere
    HOST_RECLAIMED = "its host took itself back"
    HOST_GIVEN_UP = "its host is given up"
    ANOTHER_RUN = "its worker goes over to another run"


class Release(Struct, frozen=True):
    """Hand attempts back, so that another worker can continue them."""

    attempts: tuple[AttemptRef, ...]
    reason: ReleaseReason = ReleaseReason.BALANCE


class Install(Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    run_id: str
    model: str
    publisher: bytes  # raw public key that the version's manifest is signed by
    change: bool = False  # the engine may be restarted for it


class Drain(Struct, frozen=True):
    """Hand everything over, and leave within so many seconds."""

    deadline_s: float


class Borrow(Struct, frozen=True):
    """Whether the worker's host is borrowed from now on, or why not."""

    wanted: bool
    reason: str = ""


class Forget(Struct, frozen=True):
    """A run is over."""

    run_id: str


class Forecast(Struct, frozen=True, gc=False):
    """Tokens that an attempt has still to come behind `stored`."""

    attempt_id: str
    expected_tokens: int
    longest_tokens: int
    stored: int


class Forecasts(Struct, frozen=True):
    forecasts: tuple[Forecast, ...]


CoordinatorMessage: TypeAlias = (
    AssignBatch | CancelBatch | Release | Install | Drain | Borrow | Forget | FlushPace | Forecasts
)

#: Ended episodes that a worker without new work is told of later; it forgets the others by their age.
_ENDED: Final = 1024


class SessionOutbox:
    """What one worker is told, in order. Lost with the process: what matters of it is told again as the worker
    attaches."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()
        self._ended: deque[str] = deque(maxlen=_ENDED)
        self._over = False

    async def get(self) -> CoordinatorMessage | None:
        """The next message, once there is one; None: there will be no other."""
        return await self._queue.get()

    def take(self) -> list[CoordinatorMessage]:
        """The messages that wait."""
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        return [message for message in waiting if message is not None]

    def send(self, message: CoordinatorMessage) -> None:
        """Send a message, unless the session is over."""
        if not self._over:
            self._queue.put_nowait(message)

    def end(self) -> None:
        """End the control stream, once what was sent is out."""
        self._queue.put_nowait(None)

    def close(self) -> None:
        """End it, and send nothing further."""
        self._over = True
        self.end()

    def note_ended(self, episode_id: str) -> None:
        """Note that what the worker has cached of an episode will not be continued. It hears of it with its next work:
        until then nothing needs the room.
        """
        self._ended.append(episode_id)

    def take_ended(self) -> tuple[str, ...]:
        """The ended episodes that the worker is to hear of."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def assign(self, assignments: Sequence[Assignment]) -> None:
        """Send rollouts, and what is over of those that the worker had."""
        self.send(AssignBatch(tuple(assignments), self.take_ended()))

    def cancel(self, attempts: Iterable[AttemptRef]) -> None:
        """Have the worker drop attempts that are over, or another worker's."""
        if batch := tuple(attempts):
            self.send(CancelBatch(batch))

    def request_release(self, attempts: Iterable[AttemptRef], reason: ReleaseReason = ReleaseReason.BALANCE) -> None:
        """Have the worker hand attempts back, so that another worker can continue them."""
        self.send(Release(tuple(attempts), reason))

    def tell_run_ended(self, run_id: str) -> None:
        """Tell the worker that a run is not live: live runs were read before any worker could attach, so this one has
        ended, or the store lost it. Harmless when repeated."""
        self.send(Forget(run_id))
