"""Ends sessions: as trajectories for the run's trainer, or dropped.

Each branch of a session is one trajectory, and all have the session's reward. A sampled token has mask 1 in exactly one
of them, so it is trained once; the trainer compares sessions with each other, not branches.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from ebbtide.errors import AlreadyExists, InvalidRequest
from ebbtide.gateway.episodes.live_session import LiveSession, in_thread
from ebbtide.gateway.episodes.session_player import SessionPlayer, names_of
from ebbtide.gateway.sessions.session_trace import BranchTrace, SessionTrace, session_trace
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import Run
from ebbtide.types.session import Session, SessionEnd, SessionState
from ebbtide.types.tokens import pack_ids

#: Why a session with a reward is dropped, if no token was sampled in it.
NO_TOKENS: Final = "no_tokens"


async def end_with_reward(sessions: SessionPlayer, name: str, reward: float) -> Session:
    """Make a session's branches trajectories. Completions under way stop, and count as far as they came.

    A repeat is answered as the session ended. Raises `NotFound`, `AlreadyExists` if it ended otherwise, and
    `InvalidRequest` if the run takes no sessions, or if there is nothing to compare this one with.
    """
    run = sessions.source.run
    async with sessions.found(name) as (live, session):
        names = names_of(session)
        if session.state is not SessionState.OPEN:
            if session.state is SessionState.COMPLETED and names.reward == reward:
                return session
            raise AlreadyExists(f"session {name[:100]!r} has ended {_how(session, names.reward)}")
        _check_takes(run, grouped=bool(names.group))
        await _stop(live)
        trace = await in_thread(lambda: session_trace(live.book))
        made = trajectories_of(trace, live, session, run, reward)
        how = SessionEnd(
            session_id=live.session_id,
            owner=live.owner,
            trajectories=tuple(made),
            drop_reason="" if made else NO_TOKENS,
            record=replace(names, reward=reward).packed(),
        )
        live.session = ended = await live.source.end_session(how)
        return ended


async def end_dropped(sessions: SessionPlayer, name: str, reason: str) -> Session:
    """Drop a session. A repeat is answered as it ended. Raises `NotFound`, and `AlreadyExists` if it was rewarded."""
    async with sessions.found(name) as (live, session):
        if session.state is SessionState.COMPLETED:
            raise AlreadyExists(f"session {name[:100]!r} has ended {_how(session, names_of(session).reward)}")
        if session.state is SessionState.DROPPED:
            return session
        how = SessionEnd(session_id=live.session_id, owner=live.owner, drop_reason=reason)
        live.session = ended = await live.source.end_session(how)
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
            prompt_ids=pack_ids(branch.prompt_ids),
            tokens=branch.tokens.tobytes(),
            loss_mask=branch.loss_mask.tobytes(),
        )
        for number, branch in enumerate(trace.branches)
    ]


async def _stop(live: LiveSession) -> None:
    """End completions under way, and read what they came to."""
    if missing := live.missing():
        await live.source.cancel(missing)
        await live.read(missing)


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


def _how(session: Session, reward: float | None) -> str:
    if session.state is SessionState.DROPPED:
        return f"dropped ({session.drop_reason})"
    return f"with reward {reward:g}" if reward is not None else "as trajectories"
