"""The floor: the same bytes into such a Redis with nothing around them. One connection, the C parser, RPUSH."""

import json
import math
import random
import select
import socket
import sys
import time
from collections import deque
from typing import Any

import hiredis

from benchmarks.control_plane.measures import cpu_s, spread
from tests.support.redis_servers import EmbeddedRedis

TOKENS, APPENDS = 8, 64  # tokens of an append, appends of a pipeline
_TOKEN_BYTES = 12


def raw_redis(*, rate: float, seconds: float, keys: int) -> dict[str, Any]:
    """`rate` tokens/s for `seconds` into `keys` lists of a Redis of its own, set up as an embedded one is.

    CPU is that of server and client together.
    """
    with EmbeddedRedis() as redis, socket.socket(socket.AF_UNIX) as link:
        link.connect(str(redis.socket))
        payload = random.Random(1).randbytes(TOKENS * _TOKEN_BYTES * APPENDS)
        pause, sent = APPENDS * TOKENS / rate, 0
        pipes = Pipes(link)
        mine, server, start = time.process_time(), cpu_s(redis.pid), time.monotonic()
        while (due := start + sent * pause) < start + seconds:
            pipes.take_until(due)
            pipes.send(_pipeline(payload, sent * APPENDS, keys))
            sent += 1
        pipes.take_until(math.inf)
        took = time.monotonic() - start
        cpu = time.process_time() - mine, cpu_s(redis.pid) - server
    tokens = sent * APPENDS * TOKENS
    return {
        "tokens_per_s": round(tokens / took),
        "client_cpu_s_per_mtok": round(cpu[0] / tokens * 1e6, 3),
        "redis_cpu_s_per_mtok": round(cpu[1] / tokens * 1e6, 3),
        "cpu_s_per_mtok": round(sum(cpu) / tokens * 1e6, 3),
        "pipeline": spread(pipes.latencies, "ms", 1e3),
    }


class Pipes:
    """Pipelines on one connection, several on their way at once if answers are late, as any client would have them."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._reader = link, hiredis.Reader()
        self._flying: deque[float] = deque()
        self._answers = 0
        self.latencies: list[float] = []

    def send(self, data: bytes) -> None:
        self._flying.append(time.monotonic())
        self._link.sendall(data)

    def take_until(self, due: float) -> None:
        """Read answers until `due`; until all have come, where that is sooner and there is no end."""
        while (rest := due - time.monotonic()) > 0 and (self._flying or due < math.inf):
            if not select.select([self._link], [], [], min(rest, 10.0))[0]:
                continue
            self._reader.feed(self._link.recv(1 << 16))
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise reply
                self._answers += 1
                if self._answers % APPENDS == 0:
                    self.latencies.append(time.monotonic() - self._flying.popleft())


def _pipeline(payload: bytes, first: int, keys: int) -> bytes:
    size = TOKENS * _TOKEN_BYTES
    commands: list[Any] = [
        (b"RPUSH", b"raw:%d" % ((first + i) % keys), payload[i * size : (i + 1) * size]) for i in range(APPENDS)
    ]
    return b"".join(map(hiredis.pack_command, commands))


if __name__ == "__main__":  # rate, seconds and keys
    print(json.dumps(raw_redis(rate=float(sys.argv[1]), seconds=float(sys.argv[2]), keys=int(sys.argv[3]))))
