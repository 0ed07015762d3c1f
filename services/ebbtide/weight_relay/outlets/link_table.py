"""Limits and counts the bytes that this relay sends over each link.

A link is its readers' site; without a site, it is the host that they call from. Counts live in memory alone.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from ebbtide.scheduling.distribution.link_turns import LinkAsk, LinkRate, LinkTurns
from ebbtide.types.weights import LinkState
from ebbtide.weight_relay import metrics

#: Links told apart. Readers of further links share one.
MAX_LINKS: Final = 256
OTHERS: Final = "others"


class LinkTable:
    def __init__(
        self, limits: Mapping[str, float], egress_limit: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limits`: bytes per second by site, "*" for any other; `egress_limit`: in all; 0 or none: no limit."""
        self._limits, self._clock = limits, clock
        self._turns = LinkTurns(total=egress_limit, rate_of=self._limit, now=clock())
        self._sent: dict[str, LinkRate] = {}
        self._waiting: dict[LinkAsk, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def name(self, site: str, peer: str) -> str:
        """The link of a reader of `site` that calls from `peer` (gRPC's name of it)."""
        name = site or host_of(peer)
        if name not in self._sent and len(self._sent) >= MAX_LINKS:
            name = OTHERS
        self._sent.setdefault(name, LinkRate(self._clock()))
        return name

    async def turn(self, link: str, reader: str, size: int) -> None:
        """Wait until `size` bytes may be sent to `reader` over `link` (from `name`), and count them."""
        ask = LinkAsk(link, reader, size)
        turn = self._waiting[ask] = asyncio.get_running_loop().create_future()
        self._turns.add(ask, self._clock())
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(ask, None) is not None:
                self._turns.drop(ask)
            raise
        self._sent[link].add(size, self._clock())
        metrics.LINK_BYTES.labels(link).inc(size)

    def states(self) -> list[LinkState]:
        now = self._clock()
        return [
            LinkState(site=name, bytes=rate.total, bytes_per_s=rate.lately(now), limit=self._limit(name))
            for name, rate in sorted(self._sent.items())
        ]

    def _limit(self, link: str) -> float:
        return self._limits.get(link, self._limits.get("*", 0.0))

    def _give(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while ask := self._turns.next(self._clock()):
            if not (turn := self._waiting.pop(ask)).done():
                turn.set_result(None)
        wait = self._turns.wait(self._clock())
        if wait < math.inf:
            self._timer = asyncio.get_running_loop().call_later(wait, self._give)


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: ipv4:1.2.3.4:567, ipv6:[::1]:567 or unix:path."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else kind
