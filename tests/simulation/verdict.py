"""What must hold when a run is over: its books, what its trainer saw, and what is left."""

import asyncio
from collections import Counter
from typing import Final

import numpy as np

from ebbtide.store.store_keys import run_prefix
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import RunStatus
from ebbtide.types.tokens import TOKEN_BYTES, TokenArray, unpack_tokens
from tests.simulation.engine import TAG_MASK
from tests.simulation.trainer import RUN
from tests.simulation.world import World

#: How long the store may take to be swept after the run's end, in virtual seconds.
_SWEPT_S: Final = 90.0
#: And how long workers may go on with what is over.
_REST_S: Final = 20.0
#: Attempts of all rollouts, as multiples of the rollouts; interruptions by faults come on top.
_ATTEMPTS: Final = 2.0


async def judge(world: World) -> None:
    """Tell the monitor of whatever is wrong."""
    _check_books(world)
    _check_finishes(world)
    _check_streams(world)
    _check_trajectories(world)
    _check_attempts(world)
    await _check_leaks(world)
    await _check_rest(world)
    for error in [*world.loop.errors, *world.loop.unretrieved()]:
        world.monitor.fail(f"unhandled: {error}")


def _check_books(world: World) -> None:
    run, fail = world.journal.ended, world.monitor.fail
    assert run is not None
    if run.status is not RunStatus.FINISHED:
        fail(f"the run ended as {run.status.name}: {run.message}")
    fates = Counter(world.plan.wanted[name].fate for name in world.journal.requests)
    counts = run.counters
    trained = fates.pop("trained", 0) + fates.pop("committed", 0)
    if counts.get("submitted") != len(world.journal.requests):
        fail(f"{len(world.journal.requests)} rollouts were submitted, {counts.get('submitted')} are in the books")
    if counts.get("trained", 0) != trained or run.dropped != dict(fates):
        fail(f"the books say {counts.get('trained', 0)} trained, {run.dropped}; right is {trained}, {dict(fates)}")
    if counts.get("dropped", 0) != sum(fates.values()):
        fail(f"{counts.get('dropped', 0)} are counted as dropped, not {sum(fates.values())}")
    left = {name: counts.get(name, 0) for name in ("queued", "running", "finished", "trajectories", "bytes")}
    if any(left.values()):
        fail(f"counters of an ended run: {left}")
    if counts.get("dead_lettered", 0) != len(world.monitor.letters):
        fail(f"{counts.get('dead_lettered', 0)} dead letters, right are {sorted(world.monitor.letters)}")


def _check_finishes(world: World) -> None:
    """Each rollout came once, whole."""
    for name in world.journal.requests:
        wanted, came = world.plan.wanted[name], world.journal.came.get(name, {})
        if wanted.fate == "cancelled":
            continue
        if len(came) > 1 and not world.monitor.forgetful:
            world.monitor.fail(f"{name} finished {len(came)} times")
        for finish in came.values():
            tokens = unpack_tokens(finish.tokens)
            bits = tokens["logprob"].view("<u4") & ~np.uint32(TAG_MASK)
            buried = finish.reason is FinishReason.DEAD_LETTERED and name in world.monitor.buried
            most = len(tokens) if buried else wanted.length  # a dead letter has what was generated before
            if tokens["id"].tolist() != wanted.ids[:most].tolist() or bits.tolist() != wanted.bits[:most].tolist():
                world.monitor.fail(f"{name} came with {len(tokens)} tokens that are not those of an undisturbed run")
            if not buried and finish.reason is not wanted.reason:
                world.monitor.fail(f"{name} came with reason {finish.reason.name}, not {wanted.reason.name}")


def _check_streams(world: World) -> None:
    """What a reader saw goes on without a gap, and is what was stored in the end."""
    for name, chunks in world.journal.chunks.items():
        seen = b""
        for chunk in chunks:
            if chunk.offset * TOKEN_BYTES != len(seen):
                world.monitor.fail(f"a reader of {name} got offset {chunk.offset} after {len(seen) // TOKEN_BYTES}")
                return
            seen += chunk.tokens
        for finish in world.journal.came.get(name, {}).values():
            told, right = (_untagged(unpack_tokens(part)) for part in (seen, finish.tokens[: len(seen)]))
            if told != right or not (world.monitor.forgetful or finish.tokens.startswith(seen)):
                world.monitor.fail(f"a reader of {name} saw tokens that are not those that it finished with")


def _untagged(tokens: TokenArray) -> list[tuple[int, int]]:
    """Ids and logprobs, without the mark of the attempt that made them."""
    bits = tokens["logprob"].view("<u4") & ~np.uint32(TAG_MASK)
    return list(zip(tokens["id"].tolist(), bits.tolist(), strict=True))


def _check_trajectories(world: World) -> None:
    for name, cursors in world.journal.trajectories.items():
        if len(cursors) > 1 and not world.monitor.forgetful:
            world.monitor.fail(f"episode {name} became {len(cursors)} trajectories")


def _check_attempts(world: World) -> None:
    attempts = sum(one.attempts for one in world.monitor.rollouts.values())
    most = _ATTEMPTS * len(world.journal.requests) + world.interruptions * world.plan.slots
    if attempts > most:
        world.monitor.fail(f"{attempts} attempts for {len(world.journal.requests)} rollouts")


async def _check_leaks(world: World) -> None:
    """After the sweep, what is left of the run is to expire."""
    until = world.loop.now + _SWEPT_S
    prefix = run_prefix(RUN).encode()
    while True:
        left = [key for key, item in world.store.data.items() if key.startswith(prefix) and item.expireat is None]
        if not left:
            return
        if world.loop.now > until:
            world.monitor.fail(f"left behind: {b', '.join(sorted(left)[:5]).decode()}")
            return
        await asyncio.sleep(0.5)


async def _check_rest(world: World) -> None:
    """No worker generates for a run that is over; one that was out of reach as it ended has its time to learn it."""
    until, quiet = max(world.calm_at, world.loop.now) + _REST_S, 0
    while quiet < 2:
        before = dict(world.monitor.generated)
        await asyncio.sleep(1.0)
        busy = [attempt for attempt, count in world.monitor.generated.items() if count > before.get(attempt, 0)]
        quiet = 0 if busy else quiet + 1
        if world.loop.now > until:
            world.monitor.fail(f"{len(busy)} attempts are still generated for")
            return
