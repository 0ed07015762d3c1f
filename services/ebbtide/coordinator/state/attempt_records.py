"""Makes the records of rollouts and attempts as they are queued, started, lost and queued again.

The coordinator makes them around calls of the store, a simulator around calls of its own store. They change nothing but
the attempts that `due_orphans` returns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import msgspec

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt, RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds
from ebbtide.types.fleet import AttemptRef, EndCause
from ebbtide.types.rollout import RolloutKind, RolloutRequest
from ebbtide.types.tokens import record_count


def new_entry(
    request: RolloutRequest, *, place: int, group: int, length: int, now: float, step: int = 0
) -> QueuedRollout:
    """The queue entry of a new rollout. `group`: the place of its group's first rollout; `length`: tokens of its
    prompt; `step`: that it was submitted for, if known.
    """
    alternatives = request.prompt_logprobs
    return QueuedRollout(
        rollout_id=request.rollout_id,
        episode_id=request.episode_id,
        bounds=_bounds(request.min_version, request.max_version),
        length=length,
        place=place,
        priority=request.priority,
        since=now,
        budget=request.sampling.max_tokens,
        group=group,
        evaluation=request.kind is RolloutKind.EVAL,
        request=request.kind is RolloutKind.REQUEST,
        interactive=request.interactive,
        step=step,
        turn=request.turn,
        prompt=_digest(request) if place == group else "",
        min_p=request.sampling.min_p > 0,
        score_records=0 if alternatives is None else record_count(length, alternatives),
    )


def place_of_group(run: RunState, request: RolloutRequest, place: int) -> int:
    """The place of the group's first rollout, for `new_entry`. Requests go by their own place, whatever their group."""
    return place if request.kind is RolloutKind.REQUEST else run.episodes.group_place(request.group_id, place)


def _digest(request: RolloutRequest) -> str:
    """What tells a training prompt in another epoch. The first turn's is the problem's; read back, it is not there."""
    if request.kind is not RolloutKind.TRAIN or request.turn or not request.prompt_ids:
        return ""
    return blake2b(request.prompt_ids, digest_size=12).hexdigest()


@lru_cache(1024)
def _bounds(minimum: int, maximum: int) -> VersionBounds:
    """One object for all rollouts with these bounds."""
    return VersionBounds(minimum, maximum)


def started(
    run: RunState,
    queued: QueuedRollout,
    attempt_id: str,
    *,
    stored: int,
    number: int,
    max_tokens: int,
    now: float,
    group_id: str = "",
) -> RunningAttempt:
    """The attempt at a queued rollout that the store gave to a worker; `RunState.start` takes it. `stored`: tokens of
    the response so far; `number`: of the rollout's attempts, from 1 on; `max_tokens`: of the whole response;
    `group_id`: see `draft_group`.
    """
    return run.new_attempt(
        attempt_id, queued, start=stored, max_tokens=max_tokens, number=number, given=now, group_id=group_id
    )


def draft_group(run: RunState, request: RolloutRequest) -> str:
    """The group whose tokens serve drafts of the rollout; empty for a run without speculation, and for requests: what
    one client asked is nobody else's.
    """
    off = run.spec.tail.speculation == "off" or request.kind is RolloutKind.REQUEST
    return "" if off else request.group_id


def due_orphans(
    run: RunState, now: float, more_s: float = 0.0
) -> tuple[dict[OrphanedAttempt, list[RunningAttempt]], float]:
    """The attempts of a run that are to be queued again now, by why they ended, and when the next one is due (inf:
    none). No worker can continue those from here on. `more_s`: those whose workers may still come back after a takeover
    wait so much longer.
    """
    due: defaultdict[OrphanedAttempt, list[RunningAttempt]] = defaultdict(list)
    next_due = math.inf
    for attempt in run.orphans.values():
        if (orphaned := attempt.orphaned) is None:
            continue
        when = orphaned.due + (more_s if orphaned.why.cause is EndCause.NOT_HELD else 0.0)
        if when <= now:
            attempt.leave()
            due[orphaned].append(attempt)
        else:
            next_due = min(next_due, when)
    return due, next_due


def queued_again(
    attempt: RunningAttempt, *, stored: int, avoid: frozenset[str], no_progress: int, now: float
) -> QueuedRollout:
    """The queue entry of a rollout whose attempt ended; `RunState.put_back` takes it. `stored`: tokens of the response;
    `avoid`: workers that went silent with it; `no_progress`: its latest attempts in a row that stored no token.
    """
    return msgspec.structs.replace(
        attempt.rollout,
        length=attempt.rollout.length + stored - attempt.start,
        since=now,
        avoid=avoid,
        no_progress=no_progress,
        prefer=attempt.target,
        made=stored,
        budget=max(1, attempt.max_tokens - stored),
    )


def adopt(
    state: CoordinatorState, session: WorkerSession, held: Iterable[AttemptRef]
) -> tuple[list[AttemptRef], list[AttemptRef]]:
    """Sort a worker's attempts into those that continue and those that are over."""
    adopted, superseded = [], []
    for ref in held:
        run = state.runs.get(ref.run_id)
        attempt = run.running.get(ref.rollout_id) if run else None
        if run is not None and keep_unconfirmed(state, run, ref, session):
            adopted.append(ref)
        elif attempt is None or attempt.attempt_id != ref.attempt_id or not _free(attempt, session):
            superseded.append(ref)
        else:
            attempt.assign(session)
            adopted.append(ref)
    return adopted, superseded


def keep_unconfirmed(state: CoordinatorState, run: RunState, ref: AttemptRef, session: WorkerSession) -> bool:
    """Whether a worker may keep, for now, an attempt that this coordinator does not know: the store forgot it, or it
    began just before store and coordinator restarted together.
    """
    unconfirmed = run.unconfirmed.get(ref.rollout_id)
    if unconfirmed is None and state.doubtful and ref.rollout_id not in run.running:
        nothing = VersionBounds(0, 0)
        queued = QueuedRollout(rollout_id=ref.rollout_id, episode_id="", bounds=nothing, length=0, place=0)
        now = state.clock()  # it was given earlier, which would make the worker seem stalled
        attempt = run.new_attempt(ref.attempt_id, queued, start=0, max_tokens=1 << 32, given=now)
        run.unconfirm(attempt, state.doubt_until, newer=False)
        run.mirror.mark_stale()
        unconfirmed = run.unconfirmed[ref.rollout_id]
    if unconfirmed is None or unconfirmed.attempt.attempt_id != ref.attempt_id:
        return False
    unconfirmed.attempt.assign(session)
    return True


def _free(attempt: RunningAttempt, session: WorkerSession) -> bool:
    """Whether the worker that attached with the attempt may continue it: no other worker has it, nor is it leaving."""
    other = attempt.session is not None and attempt.session.worker_id != session.worker_id
    taken = attempt.orphaned is not None and attempt.orphaned.why.avoid
    return not other and not taken and not attempt.leaving
