"""Holds what the services of all calls share: the coordinator's parts, the checks of requests, and long lists in pages.

Requests are refused as early as possible, each by the name of its field. Large lists are taken in and given out in
parts, so that other calls have their turn and messages stay within bounds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from ebbtide.coordinator.attempt_transitions import AttemptTransitions, ClientWrites
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.run_recovery import PublisherKeys, RunRecovery
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.token_readers import TokenReaders
from ebbtide.errors import EbbtideError, InvalidRequest, StoreUnavailable
from ebbtide.rpc.channel import MAX_MESSAGE_BYTES
from ebbtide.store.store import Store
from ebbtide.types.ids import check_id
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import ROLES, LeaseRef, is_gateway
from ebbtide.types.tokens import TOKEN_BYTES, token_count
from ebbtide.wire import from_proto, to_proto


class CoordinatorParts(NamedTuple):
    settings: CoordinatorSettings
    state: CoordinatorState
    store: Store
    notifier: Notifier
    fleet: WorkerRegistry
    attempts: AttemptTransitions
    recovery: RunRecovery
    publishers: PublisherKeys
    writes: ClientWrites
    readers: TokenReaders


Entry = TypeVar("Entry", bound=Message)
#: Bytes of a page, but for its last entry: an entry of the largest size still fits into the message.
_PAGE_BYTES: Final = MAX_MESSAGE_BYTES // 2


class ListPage(Generic[Entry]):
    """`size`: entries, at most; 0: as many as fit."""

    def __init__(self, kind: type[Entry], size: int) -> None:
        self._kind, self._size, self._bytes = kind, size, 0
        self.messages: list[Entry] = []
        self._last = ""
        self.next = ""  # the next page's cursor; empty if this page has the rest

    def add(self, cursor: str, entry: Struct) -> bool:
        """Add an entry, which `cursor` names; false if the page is full without it."""
        if self._bytes >= _PAGE_BYTES or len(self.messages) == self._size > 0:
            self.next = self._last
            return False
        message = to_proto(entry, self._kind)
        self.messages.append(message)
        self._bytes, self._last = self._bytes + message.ByteSize(), cursor
        return True


R = TypeVar("R", bound=Struct)


async def records_from_proto(messages: Sequence[Message], kind: type[R], *, field: str) -> list[R]:
    """As `from_proto` for each message; an error names `field` and the index. Raises `InvalidRequest`."""
    found: list[R] = []
    async for page in paced(messages):
        for message in page:
            found.append(from_proto(message, kind, field=f"{field}[{len(found)}]"))
    return found


T = TypeVar("T")
#: Entries between two pauses: a few milliseconds' work.
AT_ONCE: Final = 64
#: A pause lasts as long as the work before it, but no longer than this.
_LONGEST_S: Final = 0.05


async def paced(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """The items in pages. Between two pages is a pause as long as the caller's work on the first."""
    for first in range(0, len(items), AT_ONCE):
        began = time.monotonic()
        yield items[first : first + AT_ONCE]
        if first + AT_ONCE < len(items):
            await asyncio.sleep(min(_LONGEST_S, time.monotonic() - began))


#: Rollouts in one call: one store script takes them all, and blocks others meanwhile.
MAX_BATCH: Final = 4096
#: Digits of a place in a list, which the store keeps as a double.
_DIGITS: Final = 15


def check_batch(items: Sequence[object], *, field: str) -> None:
    if len(items) > MAX_BATCH:
        raise InvalidRequest(f"at most {MAX_BATCH} in one call; send several", field=field)


def check_lease(lease: LeaseRef, *, field: str = "lease", role: str = "", gateways: bool = False) -> LeaseRef:
    """Check that the lease is well formed, and of `role` if given. `gateways`: those of gateways will do, too."""
    check_id(lease.run_id, field=f"{field}.run_id")
    if gateways and is_gateway(lease.role):
        check_id(lease.role.partition("/")[2], field=f"{field}.role")
    elif lease.role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}", field=f"{field}.role")
    if role and lease.role != role:
        raise InvalidRequest(f"only the {role} lease allows this", field=f"{field}.role")
    if not lease.fence:
        raise InvalidRequest("is required: claim the run first", field=f"{field}.fence")
    return lease


def check_reason(reason: str, *, field: str) -> str:
    """Check a reason as an id: it becomes a counter's name."""
    return check_id(reason, field=field) if reason else reason


def check_trajectory(trajectory: Trajectory, field: str) -> None:
    """Refuse a trajectory whose parts do not fit each other."""
    if len(trajectory.tokens) % TOKEN_BYTES or token_count(trajectory.tokens) != len(trajectory.loss_mask):
        raise InvalidRequest("must have one byte per token of tokens", field=f"{field}.loss_mask")
    if len(trajectory.prompt_ids) % 4:
        raise InvalidRequest("is no run of little-endian u32 token ids", field=f"{field}.prompt_ids")
    end = 0
    for index, one in enumerate(trajectory.responses):
        if not end <= one.start < one.end <= len(trajectory.loss_mask):
            text = "must be a part of tokens, after the one before it"
            raise InvalidRequest(text, field=f"{field}.responses[{index}]")
        if any(trajectory.loss_mask[end : one.start]):
            raise InvalidRequest("has sampled tokens before it that are in none", field=f"{field}.responses[{index}]")
        end = one.end
    if trajectory.responses and any(trajectory.loss_mask[end:]):
        raise InvalidRequest("lacks the last sampled tokens", field=f"{field}.responses")


def check_number(cursor: str, default: float) -> float:
    """The number that a cursor of a list holds; `default` for an empty one."""
    if cursor and not (cursor.isdecimal() and len(cursor) <= _DIGITS):
        raise InvalidRequest("is none that was given out here; leave it empty to begin", field="cursor")
    return float(cursor or default)


def check_cursor(cursor: str, *, field: str = "cursor") -> str:
    """Check that the cursor is empty, or has the form of those given out here."""
    first, _, second = cursor.partition("-")
    given = first.isdecimal() and second.isdecimal() and len(cursor) <= 41 and max(int(first), int(second)) < 1 << 64
    if cursor and not given:
        raise InvalidRequest("is none that was given out here; leave it empty to begin", field=field)
    return cursor


@contextmanager
def unconfirmed(state: CoordinatorState, *refusals: type[EbbtideError]) -> Iterator[None]:
    """Turn a refusal into `StoreUnavailable` while the store may have forgotten what the caller saw stored: workers and
    leases send it again, and then the repeated call succeeds.
    """
    try:
        yield
    except refusals as error:
        if not state.doubtful:
            raise
        raise StoreUnavailable(f"the store came back and may have forgotten something ({error}); ask again") from None
