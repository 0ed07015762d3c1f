"""Lets attempts into the engine as its memory for keys and values allows, so that it preempts none by itself.

`rollout_worker/generation/chunk_admission.py` decides. An attempt that gives up its memory leaves the engine behind its
newest token and waits here; no token of it is lost. Engines that do not say how much memory they have
are not limited.

Invariant: each attempt is in `_waiting` or `_running`, or nowhere. The reservations of `_running` fit the memory, but
for parked ones that have not left the engine yet: nobody starts until they have. Lost with the process: nothing that
another worker needs.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from math import ceil, inf
from typing import Final

from msgspec.structs import replace

from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.generation.chunk_admission import ChunkRules, KvContext, divide_memory, is_due
from ebbtide.types.fleet import EngineInfo

#: Tokens by which a chunk is asked for early: those that come while the decision is made and others leave, twice what
#: came at once lately (a busy worker reads several steps' tokens together, and drafts make several in a step), and
_SPARE_TOKENS: Final = 6
_BURSTS: Final = 2
#: no more than this.
_MOST_AHEAD: Final = 64
#: While no memory was freed and nobody came, those that wait are looked at so often: others draw near their ends.
_LOOK_S: Final = 0.25
#: What came so long ago goes before interactive requests that came later.
_LONG_S: Final = 300.0
#: A decision later, what came at once counts for so much.
_FADING: Final = 0.9


class KvTicket:
    """One attempt at the gate."""

    def __init__(self, context: KvContext, *, first: bool) -> None:
        """`first`: it goes before the others that wait."""
        self.context, self.first = context, first
        self.inside = asyncio.Event()
        self.parked = False  # it is to leave the engine after its next tokens

    def made(self, tokens: int) -> None:
        """Its engine made so many more."""
        context = self.context
        self.context = replace(
            context,
            tokens=context.tokens + tokens,
            most=context.most - tokens,
            rest=_less(context.rest, tokens),
        )


class KvGate:
    """The gate before one engine."""

    def __init__(
        self, info: EngineInfo, slots: int, *, limits: bool, parked: Callable[[str], None] = lambda _: None
    ) -> None:
        """`limits`: whether memory limits anybody. `parked`: called with each attempt that is to leave the engine after
        its next tokens, so that they come soon."""
        self._slots, self._limits, self._park = slots, limits, parked
        self._waiting: dict[str, KvTicket] = {}
        self._running: dict[str, KvTicket] = {}
        self._deciding = False
        self._looks_at = -inf  # when those that wait are looked at next
        self._version = 0
        self._burst = 1.0  # the most tokens of an attempt that came at once lately
        self.parked = 0  # times that an attempt gave up its memory
        self.engine_changed(info)

    def engine_changed(self, info: EngineInfo) -> None:
        self._shares = info.shares_prefixes
        self._rules: ChunkRules | None = None
        if self._limits and info.kv_tokens and info.kv_block:
            self._rules = ChunkRules(kv_tokens=info.kv_tokens, block=info.kv_block, slots=self._slots)
        else:
            self._open()

    @property
    def waiting(self) -> int:
        """Attempts that wait for memory."""
        return len(self._waiting)

    def holds_back(self, key: str) -> bool:
        """Whether this attempt waits outside the engine."""
        return key in self._waiting

    @property
    def reserved(self) -> int:
        """Tokens up to which attempts have memory, over all of them; prompts that they share count for each."""
        return sum(ticket.context.reserved for ticket in self._running.values())

    def ticket(self, request: EngineRequest, prompt_ids: bytes, *, forecast: int, first: bool) -> KvTicket:
        """For a new attempt. `prompt_ids`: packed. `forecast`: tokens to come, on average; 0: unknown. `first`: it
        starts before others."""
        context = KvContext(
            key=request.request_id,
            prompt=len(prompt_ids) // 4,
            tokens=len(request.token_ids),
            most=request.max_tokens,
            since_s=time.monotonic(),
            prefix=self._prefix(request, prompt_ids),
            rest=float(forecast) if forecast else None,
        )
        return KvTicket(context, first=first)

    @asynccontextmanager
    async def room(self, ticket: KvTicket) -> AsyncGenerator[None, None]:
        """Waits until the attempt may run in the engine, for as long as the block runs."""
        if self._rules is None:
            yield
            return
        key = ticket.context.key
        self._waiting[key] = ticket
        self._look_soon()
        try:
            await ticket.inside.wait()
            yield
        finally:
            self._waiting.pop(key, None)
            self._running.pop(key, None)
            ticket.inside.clear()
            ticket.parked = False
            ticket.context = replace(ticket.context, reserved=0)
            self._look_soon()

    def made(self, ticket: KvTicket, tokens: int, version: int) -> None:
        """The engine made so many tokens, the last of them under `version`."""
        if self._rules is None:
            return
        self._version = max(self._version, version)
        self._burst = max(self._burst, float(tokens))
        ticket.made(tokens)
        if is_due(ticket.context, self._rules) and not ticket.parked:
            self._decide_soon()

    def forecast(self, key: str, rest: int, *, stored: int) -> None:
        """So many tokens are to come behind the first `stored` of the response, on average; 0: unknown."""
        if ticket := self._running.get(key) or self._waiting.get(key):
            context = ticket.context
            since = context.tokens - context.prompt - stored  # were made behind those that the forecast knew of
            ticket.context = replace(context, rest=_less(float(rest), since))
            self._look_soon()

    def _prefix(self, request: EngineRequest, prompt_ids: bytes) -> str:
        """Names what an engine has of a prompt for others, too: what older weights read is not used again, and a prompt
        is scored anew each time."""
        if not self._shares or request.prompt_logprobs is not None:
            return ""
        return f"{self._version}:{blake2b(prompt_ids, digest_size=16).hexdigest()}"

    def _look_soon(self) -> None:
        """Decide, also on those that wait."""
        self._looks_at = -inf
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Once for all tokens of a step."""
        if self._rules is not None and not self._deciding:
            self._deciding = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        if self._rules is None:
            return
        staying = [one.context for one in self._running.values() if not one.parked]
        parking = len(staying) < len(self._running)
        now, waiting = time.monotonic(), list[KvContext]()
        if not parking and now >= self._looks_at:
            self._looks_at = now + _LOOK_S
            waiting = [one.context for one in sorted(self._waiting.values(), key=partial(_rank, now=now))]
        lead = min(_MOST_AHEAD, _SPARE_TOKENS + _BURSTS * ceil(self._burst))
        self._rules, self._burst = replace(self._rules, lead=lead), max(1.0, _FADING * self._burst)
        decision = divide_memory(staying, waiting, self._rules)
        for key, reserved in decision.grown:
            self._running[key].context = replace(self._running[key].context, reserved=reserved)
        for key in decision.parked:
            self._running[key].parked = self._running[key].first = True
            self.parked += 1
            metrics.PARKED.inc()
            self._park(key)
        for key, reserved in decision.started:
            ticket = self._running[key] = self._waiting.pop(key)
            ticket.context = replace(ticket.context, reserved=reserved)
            ticket.inside.set()

    def _open(self) -> None:
        """This engine does not limit anybody."""
        for ticket in self._waiting.values():
            ticket.inside.set()
        self._running |= self._waiting
        self._waiting.clear()


def _less(forecast: float | None, tokens: int) -> float | None:
    """A forecast that was exceeded is none any more."""
    return forecast - tokens if forecast is not None and forecast > tokens else None


def _rank(ticket: KvTicket, *, now: float) -> tuple[bool, float]:
    return not (ticket.first or now - ticket.context.since_s > _LONG_S), ticket.context.since_s
