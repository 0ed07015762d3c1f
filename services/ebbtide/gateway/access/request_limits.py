"""Declares the bounds on requests, and counts those under way and the bytes of their bodies.

Invariant: a request under way is counted once, from before its body is read until its answer has ended. Its body's
bytes are counted from their arrival until nothing holds them any more: then its prompts are encoded, or it has ended.
The counts are this process's alone.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.errors import NoCapacity
from ebbtide.gateway.access.client_key import ClientKey
from ebbtide.gateway.prompt_threads import MOST_WAITING


class RequestLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what clients may ask for. More is refused, never cut."""

    body_bytes: Annotated[int, Meta(ge=1024, description="bytes of one request's body")] = 8 << 20
    bodies_bytes: Annotated[
        int, Meta(ge=1024, description="bytes of all bodies whose prompts are not encoded yet; at least body_bytes")
    ] = 256 << 20
    bodies_bytes_per_key: Annotated[
        int, Meta(ge=1024, description="bytes of such bodies under one key; at least body_bytes")
    ] = 128 << 20
    body_s: Annotated[float, Meta(gt=0, description="seconds within which a body must arrive")] = 30.0
    header_bytes: Annotated[int, Meta(ge=1024, description="bytes of a request's line and headers")] = 64 << 10
    header_s: Annotated[float, Meta(gt=0, description="seconds within which line and headers must arrive")] = 15.0
    json_depth: Annotated[int, Meta(ge=4, le=500, description="objects and lists inside each other in a body")] = 64
    json_containers: Annotated[int, Meta(ge=1 << 16, description="objects and lists in a body")] = 100_000
    prompt_tokens: Annotated[int, Meta(ge=0, description="tokens of one prompt; 0: what the model's context holds")] = 0
    prompts_waiting: Annotated[
        int, Meta(ge=1, description="prompts that wait until they are encoded; of further ones some are refused")
    ] = MOST_WAITING
    messages: Annotated[int, Meta(ge=1, description="messages of one chat")] = 4096
    tools: Annotated[int, Meta(ge=1, description="tools of one chat")] = 256
    requests_per_key: Annotated[int, Meta(ge=1, description="requests under way at once under one key")] = 1024
    requests: Annotated[int, Meta(ge=1, description="requests under way at once in this gateway")] = 4096
    completions_per_key: Annotated[
        int, Meta(ge=128, description="completions of all requests under way under one key; each is a stream")
    ] = 4096
    completions: Annotated[int, Meta(ge=128, description="completions of requests under way in this gateway")] = 16384
    request_s: Annotated[float, Meta(gt=0, description="seconds that one request may take in all")] = 21600.0
    call_s: Annotated[float, Meta(gt=0, description="seconds that a call may take that generates nothing")] = 120.0
    keep_alive_s: Annotated[
        float, Meta(gt=0, description="seconds without a token after which a stream shows that it lives")
    ] = 15.0

    @property
    def connections(self) -> int:
        """Connections at once: of requests under way, and those that are kept."""
        return 2 * self.requests + 64


class RequestSlot:
    """The place of one request under way."""

    def __init__(self, slots: "RequestSlots", owner: str) -> None:
        self._slots, self._owner = slots, owner
        self.body_bytes = 0
        self.completions = 0

    def add_completions(self, count: int) -> None:
        """Count the request's completions. Raises `NoCapacity` if those of the key, or of all, are too many."""
        self._slots.add_completions(self._owner, count)
        self.completions += count

    def add_body(self, count: int) -> None:
        """Count bytes that have arrived. Raises `NoCapacity` if the bodies of the key, or of all, have too many."""
        self._slots.add_body(self._owner, count)
        self.body_bytes += count

    def release_body(self) -> None:
        """Count the body no more. A repeat does nothing."""
        self._slots.remove_body(self._owner, self.body_bytes)
        self.body_bytes = 0


class RequestSlots:
    """Counts requests under way, in all and by key."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._by_owner: Counter[str] = Counter()
        self._body_bytes_of: Counter[str] = Counter()
        self._completions_of: Counter[str] = Counter()
        self.under_way = 0
        self.body_bytes = 0
        self.completions = 0

    def add_completions(self, owner: str, count: int) -> None:
        """Raises `NoCapacity`, and counts nothing then."""
        limits = self._limits
        if self._completions_of[owner] + count > limits.completions_per_key:
            most = limits.completions_per_key
            raise NoCapacity(f"{owner} has {most} completions under way, the most that one key may have; wait for some")
        if self.completions + count > limits.completions:
            raise NoCapacity(f"this gateway has {self.completions} completions under way, and takes no more; try again")
        self._completions_of[owner] += count
        self.completions += count

    def add_body(self, owner: str, count: int) -> None:
        """Raises `NoCapacity`, and counts nothing then."""
        limits = self._limits
        most = max(limits.bodies_bytes_per_key, limits.body_bytes)
        if self._body_bytes_of[owner] + count > most:
            raise NoCapacity(f"{owner} has bodies of {most} bytes that are read, the most of one key; try again")
        most = max(limits.bodies_bytes, limits.body_bytes)
        if self.body_bytes + count > most:
            raise NoCapacity(f"bodies of {most} bytes are read now, the most that fit; try again")
        self._body_bytes_of[owner] += count
        self.body_bytes += count

    def remove_body(self, owner: str, count: int) -> None:
        self._body_bytes_of[owner] -= count
        self.body_bytes -= count

    @contextmanager
    def taken(self, key: ClientKey) -> Iterator[RequestSlot]:
        """Count one request inside the block. Raises `NoCapacity` if there are too many already."""
        if self.under_way >= self._limits.requests:
            raise NoCapacity(f"this gateway has {self.under_way} requests under way, and takes no more; try again")
        if self._by_owner[key.owner] >= self._limits.requests_per_key:
            most = self._limits.requests_per_key
            raise NoCapacity(
                f"{key.owner} has {most} requests under way, the most that one key may have; wait for some"
            )
        self._by_owner[key.owner] += 1
        self.under_way += 1
        slot = RequestSlot(self, key.owner)
        try:
            yield slot
        finally:
            slot.release_body()
            self.completions -= slot.completions
            self._completions_of[key.owner] -= slot.completions
            self.under_way -= 1
            self._by_owner[key.owner] -= 1
            if not self._by_owner[key.owner]:
                del self._by_owner[key.owner], self._body_bytes_of[key.owner], self._completions_of[key.owner]
