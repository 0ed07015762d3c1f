"""Compares what workers saw acknowledged with what Redis has."""

import asyncio
from collections.abc import Iterable, Mapping

import redis

from benchmarks.control_plane.responses import response
from ebbtide.store.scripts import run_key
from ebbtide.types.tokens import TOKEN_BYTES
from tests.support.redis_servers import EmbeddedRedis

#: Commands of one pipeline; and one in so many rollouts is compared byte by byte.
_AT_ONCE = 2000
_COMPARED = 20


async def tokens_missing(server: EmbeddedRedis, acknowledged: Mapping[str, tuple[str, int]]) -> int:
    """Acknowledged tokens that are not stored, or stored otherwise. Rollouts that ended meanwhile are left out: their
    drivers compare them.
    """
    return await asyncio.to_thread(_missing, server, acknowledged)


def _missing(server: EmbeddedRedis, acknowledged: Mapping[str, tuple[str, int]]) -> int:
    missing = 0
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        for part in _parts(list(acknowledged.items())):
            pipe = client.pipeline()  # at one moment: a rollout may end between two commands
            for rollout, (run, _) in part:
                pipe.exists(run_key(run, "ROLLOUT", rollout))
                pipe.strlen(run_key(run, "TOKENS", rollout))
            found = pipe.execute()
            there = [
                (rollout, run, count) for (rollout, (run, count)), known in zip(part, found[::2], strict=True) if known
            ]
            lengths = {rollout: size // TOKEN_BYTES for (rollout, _), size in zip(part, found[1::2], strict=True)}
            missing += sum(max(0, count - lengths[rollout]) for rollout, _, count in there)
            for rollout, run, _ in there[::_COMPARED]:
                stored = client.get(run_key(run, "TOKENS", rollout)) or b""
                missing += stored != response(0, len(stored) // TOKEN_BYTES)
    return missing


def _parts(items: list[tuple[str, tuple[str, int]]]) -> Iterable[list[tuple[str, tuple[str, int]]]]:
    return (items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE))
