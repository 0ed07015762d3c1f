"""Defines the few small messages that the ranks of a trainer exchange to publish a version together; no weights."""

from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from ebbtide import errors
from ebbtide.errors import EbbtideError, Internal, InvalidRequest, NoCapacity
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights.version_encoding import Encoded

M = TypeVar("M", "RankStart", "RankShare", "RankWanted", "RankPut")


class RankExchange(Protocol):
    """Connects ranks 0 to `size` - 1, which all make the same calls in the same order; each call waits for the others.

    Raises `Unavailable` if another rank is gone, or silent for too long. Any transport that carries bytes will do;
    `ebbtide.client.publisher.torch_exchange` uses torch.distributed.
    """

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, in their order, on rank 0; an empty list elsewhere."""

    def broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0."""


class SingleRank:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class RankFailure(Struct, frozen=True):
    """An error that a rank reports to the others, by the name of its type."""

    kind: str
    text: str
    field: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> "RankFailure":
        kind = type(error) if isinstance(error, EbbtideError) else Internal
        if isinstance(error, InvalidRequest):
            return cls(kind.__name__, error.text, error.field)
        retry_after_s = error.retry_after_s if isinstance(error, NoCapacity) else 0.0
        return cls(kind.__name__, str(error) or type(error).__name__, retry_after_s=retry_after_s)

    def error(self) -> EbbtideError:
        if self.kind == InvalidRequest.__name__:
            return InvalidRequest(self.text, field=self.field)
        if self.kind == NoCapacity.__name__:
            return NoCapacity(self.text, retry_after_s=self.retry_after_s)
        kind = getattr(errors, self.kind, Internal)
        made: EbbtideError = kind(self.text)
        return made


class RankStart(Struct, frozen=True, kw_only=True, tag="Start"):
    """Rank 0 begins `version`."""

    version: PolicyVersion | None = None
    base: int = 0  # the version to patch; 0: none
    failure: RankFailure | None = None


class RankShare(Struct, frozen=True, kw_only=True, tag="Share"):
    """A rank's encoded share."""

    encoded: Encoded | None = None
    failure: RankFailure | None = None


class RankWanted(Struct, frozen=True, kw_only=True, tag="Wanted"):
    """Blobs of the sealed `version` to put; with a `failure` or an `end`, the exchange is over."""

    digests: tuple[bytes, ...] = ()
    version: PolicyVersion | None = None
    end: "RankEnd | None" = None
    failure: RankFailure | None = None


class RankEnd(Struct, frozen=True, kw_only=True):
    """The version is announced. Bytes and elements are of all ranks."""

    version: PolicyVersion
    base: int  # 0: a keyframe
    sent: int  # bytes
    dense: int  # bytes of the whole version
    changed: int  # elements
    elements: int


class RankPut(Struct, frozen=True, kw_only=True, tag="Put"):
    """Bytes that a rank has put."""

    sent: int = 0
    #: The blobs that the relay still lacks (`read_missing`). None: it does not know, or nothing was put.
    missing: bytes | None = None
    #: Why the rank could not put all of its blobs. Another try may succeed.
    again: RankFailure | None = None
    failure: RankFailure | None = None


class _Said(Struct, frozen=True):
    """A message about the `publish`th version that these ranks make together."""

    publish: int
    message: RankStart | RankShare | RankWanted | RankPut


def pack(publish: int, message: RankStart | RankShare | RankWanted | RankPut) -> bytes:
    return msgspec.msgpack.encode(_Said(publish, message))


def unpack(data: bytes, publish: int, kind: type[M]) -> M:
    """Decode a message of that version and `kind`. Raises `InvalidRequest` if ranks are out of step."""
    text = f"{kind.__name__} of publish {publish} was expected"
    try:
        said = msgspec.msgpack.decode(data, type=_Said)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{text}, not an unknown message ({error})", field="exchange") from None
    if said.publish != publish or not isinstance(said.message, kind):
        text = f"{text}, not {type(said.message).__name__} of {said.publish}: all ranks must publish the same versions"
        raise InvalidRequest(text, field="exchange")
    return said.message
