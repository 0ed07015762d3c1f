"""What must hold when the runs are over: the books of each, what its trainer saw, and what is left."""

import asyncio
from collections import Counter
from typing import Final

import numpy as np

from ebbtide.store.scripts import run_prefix
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import RunStatus
from ebbtide.types.tokens import TOKEN_BYTES, TokenArray, unpack_tokens
from tests.simulation.engine import TAG_MASK
from tests.simulation.monitor import Monitor
from tests.simulation.plan import key_of
from tests.simulation.trainer import Journal
from tests.simulation.world import World

#: How long the store may take to be swept after the run's end, in virtual seconds.
_SWEPT_S: Final = 90.0
#: And how long workers may go on with what is over.
_REST_S: Final = 20.0
#: Attempts of all rollouts, as multiples of the rollouts; interruptions by faults come on top.
_ATTEMPTS: Final = 2.0


async def judge(world: World) -> None:
    """Tell the monitor of whatever is wrong."""
    for journal in world.journals.values():
        _check_books(journal, world.monitor)
        _check_finishes(journal, world.monitor)
        _check_streams(journal, world.monitor)
        _check_trajectories(journal, world.monitor)
    _check_attempts(world)
    for journal in world.journals.values():
        await _check_leaks(world, journal.plan.run_id)
    await _check_rest(world)
    for error in [*world.loop.errors, *world.loop.unretrieved()]:
        world.monitor.fail(f"unhandled: {error}")


def _check_books(journal: Journal, monitor: Monitor) -> None:
    run, fail = journal.ended, monitor.fail
    assert run is not None
    counts = run.counters
    # A store that forgot a submit may hear of the cancellation before the lease has submitted again.
    unheard = monitor.forgetful and run.status is RunStatus.CANCELLED
    known = counts.get("submitted", 0)
    if known != len(journal.requests) and not (unheard and known < len(journal.requests)):
        fail(f"{run.run_id}: {len(journal.requests)} were submitted, {known} are in the books")
    if counts.get("trained", 0) + counts.get("dropped", 0) != known:
        fail(f"{run.run_id}: {len(journal.requests)} were submitted, the books end with {counts}")
    if counts.get("dropped", 0) != sum(run.dropped.values()):
        fail(f"{run.run_id}: {counts.get('dropped', 0)} are counted as dropped, not {run.dropped}")
    left = {name: counts.get(name, 0) for name in ("queued", "running", "finished", "trajectories", "bytes")}
    if any(left.values()):
        fail(f"counters of {run.run_id}, which has ended: {left}")
    if journal.plan.cancel_after >= 0:
        _check_cancelled(journal, monitor)
        return
    if run.status is not RunStatus.FINISHED:
        fail(f"{run.run_id} ended as {run.status.name}: {run.message}")
    fates = Counter(journal.plan.wanted[name].fate for name in journal.requests)
    trained = fates.pop("trained", 0) + fates.pop("committed", 0)
    if counts.get("trained", 0) != trained or run.dropped != dict(fates):
        fail(f"{run.run_id}: {counts.get('trained', 0)} trained, {run.dropped}; right is {trained}, {dict(fates)}")
    letters = {name for name in monitor.letters if monitor.rollouts[name].run.run_id == run.run_id}
    if counts.get("dead_lettered", 0) != len(letters):
        fail(f"{counts.get('dead_lettered', 0)} dead letters of {run.run_id}, right are {sorted(letters)}")


def _check_cancelled(journal: Journal, monitor: Monitor) -> None:
    """A run that its user cancelled: what the trainer settled before stays, all else is dropped."""
    run = journal.ended
    assert run is not None
    if run.status is not RunStatus.CANCELLED:
        monitor.fail(f"{run.run_id} was cancelled and ended as {run.status.name}: {run.message}")
    fates = Counter(journal.plan.wanted[name].fate for name in journal.requests)
    settled = Counter(journal.plan.wanted[name].fate for name in journal.over)
    if monitor.forgetful:
        settled.clear()  # the store may have forgotten it, and had no time to hear it again
    for fate, said in {"trained": run.counters.get("trained", 0), **run.dropped}.items():
        least, most = settled[fate], fates[fate]
        if fate == "trained":
            most += fates["committed"]  # settled before they are committed
        if said < least or (said > most and fate != "cancelled"):
            monitor.fail(f"{run.run_id}: {said} are {fate}; its trainer settled {least}, and {most} can be")


def _check_finishes(journal: Journal, monitor: Monitor) -> None:
    """Each rollout came once, whole."""
    for rollout_id in journal.requests:
        wanted, came = journal.plan.wanted[rollout_id], journal.came.get(rollout_id, {})
        name = key_of(journal.plan.run_id, rollout_id)
        if wanted.fate == "cancelled":
            continue
        if len(came) > 1 and not monitor.forgetful:
            monitor.fail(f"{name} finished {len(came)} times")
        for finish in came.values():
            tokens = unpack_tokens(finish.tokens)
            bits = tokens["logprob"].view("<u4") & ~np.uint32(TAG_MASK)
            buried = finish.reason is FinishReason.DEAD_LETTERED and name in monitor.buried
            most = len(tokens) if buried else wanted.length  # a dead letter has what was generated before
            if tokens["id"].tolist() != wanted.ids[:most].tolist() or bits.tolist() != wanted.bits[:most].tolist():
                monitor.fail(f"{name} came with {len(tokens)} tokens that are not those of an undisturbed run")
            if not buried and finish.reason is not wanted.reason:
                monitor.fail(f"{name} came with reason {finish.reason.name}, not {wanted.reason.name}")


def _check_streams(journal: Journal, monitor: Monitor) -> None:
    """What a reader saw goes on without a gap, and is what was stored in the end."""
    for rollout_id, chunks in journal.chunks.items():
        name, seen = key_of(journal.plan.run_id, rollout_id), b""
        for chunk in chunks:
            if chunk.offset * TOKEN_BYTES != len(seen):
                monitor.fail(f"a reader of {name} got offset {chunk.offset} after {len(seen) // TOKEN_BYTES}")
                return
            seen += chunk.tokens
        for finish in journal.came.get(rollout_id, {}).values():
            told, right = (_untagged(unpack_tokens(part)) for part in (seen, finish.tokens[: len(seen)]))
            if told != right or not (monitor.forgetful or finish.tokens.startswith(seen)):
                monitor.fail(f"a reader of {name} saw tokens that are not those that it finished with")


def _untagged(tokens: TokenArray) -> list[tuple[int, int]]:
    """Ids and logprobs, without the mark of the attempt that made them."""
    bits = tokens["logprob"].view("<u4") & ~np.uint32(TAG_MASK)
    return list(zip(tokens["id"].tolist(), bits.tolist(), strict=True))


def _check_trajectories(journal: Journal, monitor: Monitor) -> None:
    for name, cursors in journal.trajectories.items():
        if len(cursors) > 1 and not monitor.forgetful:
            monitor.fail(f"episode {name} of {journal.plan.run_id} became {len(cursors)} trajectories")


def _check_attempts(world: World) -> None:
    attempts = sum(one.attempts for one in world.monitor.rollouts.values())
    rollouts = sum(len(journal.requests) for journal in world.journals.values())
    if attempts > _ATTEMPTS * rollouts + world.interruptions * world.plan.slots:
        world.monitor.fail(f"{attempts} attempts for {rollouts} rollouts")


async def _check_leaks(world: World, run_id: str) -> None:
    """After the sweep, what is left of the run is to expire."""
    until = world.loop.now + _SWEPT_S
    prefix = run_prefix(run_id).encode()
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
