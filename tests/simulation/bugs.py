"""Planted bugs: each a mistake that somebody could make, put into the code under test for a few seeds.

A test of the tests: the simulation must find them. In scripts a piece of text is replaced, which must be there; in
Python a method. All of them do harm only when something else fails at the wrong moment, or, those of `fleet_bugs`, when
there are several runs or coordinators.
"""

import asyncio
from typing import Any, Final

import msgspec

from ebbtide.coordinator.fleet import worker_registry
from ebbtide.coordinator.rules import worker_view
from ebbtide.coordinator.rules.liveness import Liveness
from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.token_readers import TokenReader
from ebbtide.errors import StoreUnavailable
from ebbtide.rollout_worker.generation.generation import Assignment, Generation, ResponseEnding
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.generation.outbox import Outbox
from ebbtide.store.rollouts import AppendTopic
from ebbtide.types.tokens import TOKEN_BYTES
from tests.simulation.fleet_bugs import FLEET_BUGS
from tests.simulation.planting import Bug, lua, python


def _without_pressure(settle: Any) -> Any:
    def wrong(self: LocalAttempts, *args: Any, **options: Any) -> None:
        pressure, self.pressure = self.pressure, asyncio.Event()
        settle(self, *args, **options)
        self.pressure = pressure

    return wrong


def _ahead_of_the_store(append: Any) -> Any:
    async def wrong(self: AppendTopic, *args: Any) -> Any:
        try:
            return await append(self, *args)
        except StoreUnavailable:
            return {}  # "all stored": it surely will be

    return wrong


def _stays_stale(refresh: Any) -> Any:
    async def wrong(self: RunRecovery, run: Any) -> None:
        if not run.running and not run.queue:
            await refresh(self, run)
        run.mirror.stale = False

    return wrong


def _room_forgets_partial(init: Any) -> Any:
    """Its limits count from where this attempt began."""

    def wrong(self: ResponseEnding, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        whole, self._seen = self.at, 0  # type: ignore[attr-defined]

        def at(ids: Any) -> Any:
            first = self._seen = self._seen or len(ids)  # type: ignore[attr-defined]
            return whole(ids) if first <= 1 else whole(ids[first - 1 :])

        self.at = at  # type: ignore[method-assign]

    return wrong


def _asks_for_all(request: Any) -> Any:
    def wrong(self: Generation) -> Any:
        return msgspec.structs.replace(request(self), max_tokens=self._ending.limit)

    return wrong


def _forgets_what_flew(rewind: Any) -> Any:
    """What was on its way counts as stored: the next tokens take its place."""

    def wrong(self: Outbox, now: float) -> None:
        for output in self._outputs.values():
            del output.tokens[output.stored * TOKEN_BYTES : output.sent * TOKEN_BYTES]
        rewind(self, now)

    return wrong


def _takes_what_it_has(take: Any) -> Any:
    """What was pushed is taken for what follows the reader's last token."""

    def wrong(self: TokenReader, offset: int) -> Any:
        self._begin, self._end = offset, offset + len(self._tokens) // TOKEN_BYTES
        return take(self, offset)

    return wrong


def _keeps_superseded(settle: Any) -> Any:
    def wrong(self: Outbox, acks: Any, **options: Any) -> Any:
        return settle(self, [ack for ack in acks if ack.status.name != "SUPERSEDED"], **options)

    return wrong


def _adopts_anything(adopt: Any) -> Any:
    def wrong(state: Any, session: Any, held: Any) -> Any:
        refs = list(held)
        adopted, superseded = adopt(state, session, refs)
        return [*adopted, *superseded], []

    return wrong


BUGS: Final[dict[str, Bug]] = {
    "an append whose attempt is not compared": lua(
        ("if have[place + 1] == attempts[place] and", "if have[place + 1] and")
    ),
    "an append that overlaps what is stored": lua(
        ("if stored + new ~= ends[place] or", "if stored + new < ends[place] or"),
        ("if stored == ends[place] then return stored, true", "if stored >= ends[place] then return stored, true"),
    ),
    "a repeat taken for new by one token": lua(
        ("if stored + new ~= ends[place] or", "if stored + new ~= ends[place] and stored + new ~= ends[place] + 1 or"),
        (
            "if stored == ends[place] then return stored, true",
            "if stored == ends[place] or stored == ends[place] + 1 then return stored, true",
        ),
    ),
    "a term that is not checked": lua(
        ("if have[1] ~= term then return refuse('TERM') end", ""),
        ("if have[1] ~= ARGV[1] then return barred(ARGV[1]) end", "if not have[1] then return barred(ARGV[1]) end"),
    ),
    "a lease fence that is ignored": lua(("if role ~= '' and have[2] ~= fence then", "if false then")),
    "an episode completed twice": lua(
        ("if redis.call('SISMEMBER', DONE, mark) == 1 then return {0} end", ""),
        ("if reason == '' and (train > 0) ~= (data ~= '') then return refuse('TRAJECTORY', tostring(train)) end", ""),
    ),
    "a finish that leaves its fence": lua(
        (
            "local function finish(id, state, reason, message)\n  redis.call('HDEL', FENCE, 'r:' .. id)",
            "local function finish(id, state, reason, message)",
        )
    ),
    "a rollout that is forgotten and not marked as over": lua(("  mark_over('r:' .. id, r[4])\n", "")),
    "a mark that goes before its step is over": lua(
        ("if of ~= '' and tonumber(of) >= first_step then return end", "if of == '' then return end")
    ),
    "a requeue that loses tokens": lua(
        (
            "redis.call('HSET', ROLLOUT .. id, 'state', 'queued', 'barren'",
            "redis.call('DEL', TOKENS .. id)\n      redis.call('HSET', ROLLOUT .. id, 'state', 'queued', 'barren'",
        )
    ),
    "a resume one token too far": lua(
        ("{r[5], r[6], tokens, attempts}", "{r[5], r[6], tokens .. string.sub(tokens, -12), attempts}")
    ),
    "a submit that begins again": lua(("if known then out", "if known and have[2] == 'queued' then out")),
    "a wake-up that is lost": python((LocalAttempts, "settle", _without_pressure)),
    "a stream that goes on behind what was on its way": python((Outbox, "rewind", _forgets_what_flew)),
    "an acknowledgement before the store": python((AppendTopic, "append", _ahead_of_the_store)),
    "a push that is not compared with its reader's offset": python((TokenReader, "_take", _takes_what_it_has)),
    "a limit that forgets the partial": python(
        (ResponseEnding, "__init__", _room_forgets_partial), (Generation, "request", _asks_for_all)
    ),
    "an attempt handed back before it is stored": python(
        (Outbox, "stored_whole", lambda _: lambda self, attempt_id: True)
    ),
    "a stale mirror that stays stale": python((RunRecovery, "refresh", _stays_stale)),
    "a silence that is never judged": python((Liveness, "silent", lambda _: lambda self, now: [])),
    "version bounds that bind nobody": python(
        (Assignment, "admits", lambda _: lambda self, version: True),
        (worker_view, "admits", lambda _: lambda bounds, version: version > 0),
    ),
    "an attempt that lives on though superseded": python(
        (Outbox, "settle", _keeps_superseded), (worker_registry, "adopt", _adopts_anything)
    ),
    **FLEET_BUGS,
}
