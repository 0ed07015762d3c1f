"""Reads this process's rank from the environment variables of torchrun and `rank_launcher`."""

from collections.abc import Mapping

from msgspec import Struct

from ebbtide.errors import InvalidRequest

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Descriptor of a listening loopback socket for rank 0's store; torch's own socket listens on all addresses.
LISTENING = "EBBTIDE_RANKS_LISTENING"


class RankPlace(Struct, frozen=True, kw_only=True):
    rank: int
    size: int
    local_rank: int  # on this host
    listening: int | None = None  # rank 0's socket, if given


def place_of(environ: Mapping[str, str], ranks: int) -> RankPlace | None:
    """Returns this process's place, if the environment gives one; `ranks` is the setting (1: none).

    Raises `InvalidRequest` naming the variable, or the contradicting setting.
    """
    if "WORLD_SIZE" not in environ or "RANK" not in environ:
        return None
    if missing := [name for name in _NAMES if not environ.get(name)]:
        raise InvalidRequest("is missing beside RANK and WORLD_SIZE; start the ranks by torchrun", field=missing[0])
    size = _number(environ, "WORLD_SIZE", 1)
    place = RankPlace(
        rank=_number(environ, "RANK", 0),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0) if "LOCAL_RANK" in environ else 0,
        listening=_number(environ, LISTENING, 0) if LISTENING in environ else None,
    )
    if place.rank >= size:
        raise InvalidRequest(f"is {place.rank}, but must be below {size}", field="RANK")
    if ranks not in (1, size):
        raise InvalidRequest(f"is {ranks}, but the environment's WORLD_SIZE is {size}; give only one", field="ranks")
    return place if size > 1 else None


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    try:
        number = int(environ[name])
    except ValueError:
        raise InvalidRequest(f"must be a number, not {environ[name]!r}", field=name) from None
    if number < least:
        raise InvalidRequest(f"must be at least {least}", field=name)
    return number
