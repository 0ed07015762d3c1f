"""How the ranks of one trainer talk while they publish a version together: a few small messages, no weights."""

from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from ebbtide import errors
from ebbtide.errors import EbbtideError, Internal, InvalidRequest, NoCapacity
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights.version_encoding import Encoded

M = TypeVar("M", "RankStart", "RankShare", "RankWanted", "RankPut")


class RankExchange(Protocol):
    """Ranks 0 to `size` - 1, which all make the same calls in the same order; a call blocks until the others made it.

    Raises `Unavailable` when another rank is gone, or silent for too long. `ebbtide.client.publisher.torch_exchange`
    has one over torch.distributed; any other transport that carries bytes will do.
    """

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0: what each rank gave, in their order. Elsewhere: nothing."""

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave."""


class SingleRank:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class RankFailure(Struct, frozen=True):
    """An error that one rank tells the others, by the name of its type."""

    kind: str
    text: str
    field: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> "RankFailure":
        kind = type(error) if isinstance(error, EbbtideError) else Internal
        field = error.field if isinstance(error, InvalidRequest) else ""
        retry_after_s = error.retry_after_s if isinstance(error, NoCapacity) else 0.0
        return cls(kind.__name__, str(error) or type(error).__name__, field, retry_after_s)

    def error(self) -> EbbtideError:
        if self.kind == InvalidRequest.__name__:
            return InvalidRequest(self.text, field=self.field)
        if self.kind == NoCapacity.__name__:
            return NoCapacity(self.text, retry_after_s=self.retry_after_s)
        kind = getattr(errors, self.kind, Internal)
        made: EbbtideError = kind(self.text)
        return made


class RankStart(Struct, frozen=True, kw_only=True, tag="Start"):
    """Rank 0 begins `version`; `base` is the version that the patch, if there is one, leads from (0: none)."""

    version: PolicyVersion | None = None
    base: int = 0
    failure: RankFailure | None = None


class RankShare(Struct, frozen=True, kw_only=True, tag="Share"):
    """What a rank has encoded."""

    encoded: Encoded | None = None
    failure: RankFailure | None = None


class RankWanted(Struct, frozen=True, kw_only=True, tag="Wanted"):
    """Blobs of the sealed `version` to put; or, with a `failure` or an `end`, that nothing more is to be done."""

    digests: tuple[bytes, ...] = ()
    version: PolicyVersion | None = None
    end: "RankEnd | None" = None
    failure: RankFailure | None = None


class RankEnd(Struct, frozen=True, kw_only=True):
    """The version is announced. Bytes and elements are of all ranks."""

    version: PolicyVersion
    base: int  # 0: an anchor
    sent: int
    dense: int
    changed: int
    elements: int


class RankPut(Struct, frozen=True, kw_only=True, tag="Put"):
    """Bytes that a rank has put."""

    sent: int = 0
    #: What the version still lacks by the relay's answer (`read_missing`). None: it does not know, or nothing was put.
    missing: bytes | None = None
    #: Why the rank could not put all of its blobs. Another try may succeed.
    again: RankFailure | None = None
    failure: RankFailure | None = None


class _Said(Struct, frozen=True):
    """A message of the `publish`th version that these ranks make together."""

    publish: int
    message: RankStart | RankShare | RankWanted | RankPut


def pack(publish: int, message: RankStart | RankShare | RankWanted | RankPut) -> bytes:
    return msgspec.msgpack.encode(_Said(publish, message))


def unpack(data: bytes, publish: int, kind: type[M]) -> M:
    """The message, which must be of that version and `kind`. Raises `InvalidRequest` when ranks are out of step."""
    text = f"{kind.__name__} of publish {publish} was to come"
    try:
        said = msgspec.msgpack.decode(data, type=_Said)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{text}, and not what this is ({error})", field="exchange") from None
    if said.publish != publish or not isinstance(said.message, kind):
        text = f"{text}, not {type(said.message).__name__} of {said.publish}: all ranks publish the same versions"
        raise InvalidRequest(text, field="exchange")
    return said.message
