"""Ends sessions: as trajectories for the run's trainer, or dropped.

Each branch of a session is one trajectory, and all have the session's reward. A sampled token has mask 1 in exactly one
of them, so it is trained once; the trainer compares sessions with each other, not branches.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from ebbtide.errors import AlreadyExists, InvalidRequest
from ebbtide.gateway.sessions.live import LiveSession, in_thread
from ebbtide.gateway.sessions.trace import BranchTrace, SessionTrace, session_trace
from ebbtide.gateway.sessions.turn_player import SessionPlayer
from ebbtide.gateway.sessions.turns import names_of
from ebbtide.types.rollout import SampledResponse, Trajectory
from ebbtide.types.run import Run, Sampling
from ebbtide.types.session import Session, SessionEnd, SessionState

#: Why a session with a reward is dropped, if no token was sampled in it.
NO_TOKENS: Final = "no_tokens"
#: Between cancels of completions that have not ended.
_AGAIN_S: Final = 1.0


async def end_with_reward(sessions: SessionPlayer, name: str, reward: float) -> Session:
    """Make a session's branches trajectories. Completions under way stop, and count as far as they came.

    A repeat is answered as the session ended. Raises `NotFound`, `AlreadyExists` if it ended otherwise, and
    `InvalidRequest` if the run takes no sessions, or if there is nothing to compare this one with.
    """
    run = sessions.lease.run
    async with sessions.found(name) as (live, session):
        names = names_of(session)
        if session.state is not SessionState.OPEN:
            if session.state is SessionState.COMPLETED and names.reward == reward:
                return session
            raise AlreadyExists(f"session {name[:100]!r} has ended {_how(session, names.reward)}")
        how = await _completed(live, session, run, reward)
        record = replace(names, reward=reward).packed()
        live.session = ended = await live.lease.end_session(replace(how, record=record))
        return ended


async def end_for_verdict(sessions: SessionPlayer, name: str, verifier: str, data: bytes) -> Session:
    """End a session, whose branches become trajectories with the reward that a verifier gives them later. `verifier`: a
    name of the run's; "" for its default. `data`: for the verifier, a JSON object.

    A repeat is answered as the session stands. Raises `NotFound`, `AlreadyExists` if it ended otherwise, and
    `InvalidRequest` if the run has no such verifier, or takes no sessions.
    """
    run = sessions.lease.run
    verifier = _known_verifier(run, verifier)
    async with sessions.found(name) as (live, session):
        if session.state is not SessionState.OPEN:
            if session.verifier == verifier:
                return session
            raise AlreadyExists(f"session {name[:100]!r} has ended {_how(session, names_of(session).reward)}")
        how = await _completed(live, session, run, 0.0)
        if how.trajectories:
            how = replace(how, verifier=verifier, data=data)
        live.session = ended = await live.lease.end_session(how)
        return ended


async def _completed(live: LiveSession, session: Session, run: Run, reward: float) -> SessionEnd:
    """The end of an open session as trajectories. Its completions stop. Without a token it is dropped."""
    _check_takes(run, grouped=bool(names_of(session).group))
    await _stop(live)
    trace = await in_thread(lambda: session_trace(live.book))
    made = trajectories_of(trace, live, session, run, reward)
    return SessionEnd(
        session_id=live.session_id,
        owner=live.owner,
        trajectories=tuple(made),
        drop_reason="" if made else NO_TOKENS,
    )


async def end_dropped(sessions: SessionPlayer, name: str, reason: str) -> Session:
    """Drop a session. A repeat is answered as it ended. Raises `NotFound`, and `AlreadyExists` if it was rewarded."""
    async with sessions.found(name) as (live, session):
        if session.state in (SessionState.COMPLETED, SessionState.VERIFYING):
            raise AlreadyExists(f"session {name[:100]!r} has ended {_how(session, names_of(session).reward)}")
        if session.state is SessionState.DROPPED:
            return session
        how = SessionEnd(session_id=live.session_id, owner=live.owner, drop_reason=reason)
        live.session = ended = await live.lease.end_session(how)
        return ended


def trajectories_of(
    trace: SessionTrace, live: LiveSession, session: Session, run: Run, reward: float
) -> list[Trajectory]:
    """The branches of a session. The first bears the session's figures."""
    figures = {
        "turns": float(len(trace.turns)),
        "branches": float(len(trace.branches)),
        "unmatched_tokens": float(trace.unmatched),
        "unknown_answers": float(trace.unknown),
    }
    return [
        Trajectory(
            episode_id=f"{session.session_id}.{number}",
            group_id=session.group_id,
            step=run.newest.step if run.newest else 0,
            group_size=run.spec.batch.group_size if session.group_id != session.session_id else 1,
            reward=reward,
            truncated=_truncated(live, branch),
            rollouts=branch.rollouts,
            metrics={} if number else figures,
            session_id=session.session_id,
            branches=len(trace.branches),
            cursor="",
            **branch.packed(),
            responses=_responses(live, branch),
        )
        for number, branch in enumerate(trace.branches)
    ]


def _responses(live: LiveSession, branch: BranchTrace) -> tuple[SampledResponse, ...]:
    """How each response of a branch was sampled: requests of a session may differ in that."""
    return tuple(
        SampledResponse(start=start, end=end, sampling=_kept(live.settings_of(key.turn).sampling))
        for key, (start, end) in branch.responses.items()
    )


def _kept(sampling: Sampling) -> Sampling:
    """What probabilities depend on: stop tokens only where none may be sampled before `min_tokens`."""
    return sampling if sampling.min_tokens else replace(sampling, stop_token_ids=())


async def _stop(live: LiveSession) -> None:
    """End completions under way, and read what they came to. A cancel that comes before a submit ends nothing, so it is
    repeated.
    """
    if not (missing := live.missing()):
        return
    reading = asyncio.create_task(live.read(missing))
    try:
        while not reading.done():
            await live.lease.cancel_rollouts(missing)
            await asyncio.wait({reading}, timeout=_AGAIN_S)
        reading.result()
    finally:
        reading.cancel()


def _truncated(live: LiveSession, branch: BranchTrace) -> bool:
    rollouts: Sequence[str] = live.book.turns[branch.leaf.turn].rollout_ids
    return rollouts[branch.leaf.completion] in live.truncated


def _check_takes(run: Run, *, grouped: bool) -> None:
    """Whether the run's trainer takes this session."""
    if run.spec.external:
        return
    if not run.spec.from_agents:
        text = (
            f"run {run.run_id} plays its episodes itself, in {run.spec.environment.name!r}; give a drop_reason, or "
            'submit a run whose environment.name is "agents"'
        )
        raise InvalidRequest(text, field="reward")
    if not grouped:
        text = "the run's trainer compares sessions of a group, and this one has none; begin sessions with X-Group-ID"
        raise InvalidRequest(text, field="reward")


def _known_verifier(run: Run, name: str) -> str:
    """The verifier that is meant. Raises `InvalidRequest` with the names of the run's."""
    environment = run.spec.environment
    known = ", ".join(sorted(environment.verifiers)) or "none"
    if not name and not environment.verifier:
        text = f"is required, or a reward, or a drop_reason: the run has no default verifier (verifiers: {known})"
        raise InvalidRequest(text, field="verifier")
    if (meant := name or environment.verifier) not in environment.verifiers:
        raise InvalidRequest(f"the run has no verifier {name[:100]!r}; its verifiers: {known}", field="verifier")
    return meant


def _how(session: Session, reward: float | None) -> str:
    if session.state is SessionState.DROPPED:
        return f"dropped ({session.drop_reason})"
    if session.verifier:
        return f"with verifier {session.verifier}"
    return f"with reward {reward:g}" if reward is not None else "as trajectories"
