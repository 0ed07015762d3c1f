"""Chooses the policy version of each worker, and tells workers which one to install."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.rules.worker_view import admits
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_messages import Install
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.step_pacing import VersionBounds

#: How long a failed engine start is remembered.
_REFUSED_S: Final = 600.0


class EngineChanges:
    """Says which runs need an engine restart on which worker, and whether it is allowed. `allotment` weighs whether it
    pays.

    Invariant: a run's architecture is known once a worker has installed or refused its weights. An architecture that a
    worker's engine could not be started for is not tried there again for `_REFUSED_S`. Lost with the process, and
    learnt again from workers.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state

    def barred(self, session: WorkerSession, now: float) -> frozenset[str]:
        """Runs that the worker may not serve; while its engine restarts for one, all others."""
        changing = session.changing
        if changing is not None and changing.restarted and changing.run_id in self._state.runs:
            return frozenset(self._state.runs.keys() - {changing.run_id})
        architecture = session.hello.engine.architecture
        foreign = [
            run
            for run in self._state.runs.values()
            if run.versions.architecture and run.versions.architecture != architecture
        ]
        return frozenset(run.run_id for run in foreign if self.forbids(run, session, now))

    def needed(self, run: RunState, session: WorkerSession) -> bool:
        """Whether the run's weights fit the worker's engine only after a restart."""
        known = bool(run.versions.architecture) and not session.version_of(run.run_id)
        return known and session.hello.engine.architecture != run.versions.architecture

    def forbids(self, run: RunState, session: WorkerSession, now: float) -> bool:
        """Whether the worker's engine would have to restart for the run, and may not. A run that no worker can serve is
        still offered, so that refusals reveal it; so is one to a worker that never restarts its engine.
        """
        if not self.needed(run, session) or may_change(run, session, now):
            return False
        return session.beat.restart_s > 0 and (run.versions.fitted or self.served_by_somebody(run, now))

    def served_by_somebody(self, run: RunState, now: float) -> bool:
        """Whether an attached worker has the run's architecture, or may restart for it."""
        open_sessions = (one for one in self._state.sessions.values() if not one.draining)
        return any(not self.needed(run, one) or may_change(run, one, now) for one in open_sessions)


def may_change(run: RunState, session: WorkerSession, now: float) -> bool:
    """Whether the worker's engine may restart for the run. It then has no tokenizer, which stop strings need."""
    refused = session.refused.get(run.versions.architecture, 0.0) > now
    return session.beat.restart_s > 0 and not refused and not run.spec.sampling.stop


def refused(session: WorkerSession, architecture: str, now: float) -> None:
    """Note that the worker's engine could not be started for it."""
    session.refuse(architecture, now + _REFUSED_S)


#: Refusals per worker of another architecture's weights before the run fails: time for a fitting worker to attach.
_REFUSALS: Final = 3


class ServedVersion(Struct, frozen=True, kw_only=True):
    """A worker of the run."""

    session_id: str
    installed: int  # version of this run; 0: none
    running: int
    held: frozenset[VersionBounds] = frozenset()  # bounds of its rollouts


def target_versions(
    workers: Sequence[ServedVersion], waiting: Iterable[VersionBounds], announced: Iterable[int]
) -> dict[str, int]:
    """Each worker's version, of the available ones (`announced`). Empty before the first.

    It is the newest, with two exceptions. A worker that holds rollouts with a ceiling below the newest stays until they
    end. While rollouts with such a ceiling wait, one worker per ceiling stays at, or returns to, a version that may
    serve them.
    """
    versions = sorted(announced)
    if not versions:
        return {}
    newest = versions[-1]
    targets = {one.session_id: newest for one in workers}
    for one in workers:
        if not all(admits(bounds, newest) for bounds in one.held):
            targets[one.session_id] = one.installed
    pinned: set[str] = set()
    for bounds in sorted({b for b in waiting if b.maximum and b.maximum < newest}, key=lambda b: b.maximum):
        if any(admits(bounds, targets[session_id]) for session_id in pinned):
            continue
        keeper = _keeper([one for one in workers if one.session_id not in pinned], bounds)
        within = [version for version in versions if admits(bounds, version)]
        if keeper is None or not within:
            continue
        pinned.add(keeper.session_id)
        targets[keeper.session_id] = keeper.installed if admits(bounds, keeper.installed) else within[-1]
    return targets


def _keeper(workers: Sequence[ServedVersion], bounds: VersionBounds) -> ServedVersion | None:
    """The worker that should serve `bounds`: one with such a version, else the idlest whose rollouts allow a change."""
    having = [one for one in workers if admits(bounds, one.installed)]
    if having:
        return min(having, key=lambda one: (one.running, one.session_id))
    movable = [one for one in workers if all(admits(held, bounds.maximum) for held in one.held)]
    return min(movable, key=lambda one: (one.running, one.session_id), default=None)


def unservable(bounds: VersionBounds, announced: Iterable[int]) -> bool:
    """Whether no version within `bounds` is available any more, since all later ones are above the ceiling."""
    versions = list(announced)
    newest = max(versions, default=0)
    return bool(bounds.maximum) and bounds.maximum < newest and not any(admits(bounds, v) for v in versions)


def fits_nowhere(architecture: str, attached: Sequence[str], refusals: int) -> bool:
    """Whether no attached worker can install weights of `architecture`. `attached`: their models' architectures;
    `refusals`: how often such weights were refused.
    """
    return bool(attached) and architecture not in attached and refusals >= _REFUSALS * len(attached)


class InstallSender:
    """Tells workers which version to install.

    Invariant: a worker whose `target` is the run's newest version stays there, unless rollouts with a lower ceiling
    wait. So only the others are looked at.

    `public_key`: of a run's publisher, raw; workers verify versions with it.
    """

    def __init__(self, state: CoordinatorState, changes: EngineChanges, public_key: Callable[[str], bytes]) -> None:
        self._state, self._changes, self._public_key = state, changes, public_key

    def send(self, run: RunState, now: float) -> None:
        """Tell workers which version to install; those that still hold another run's rollouts are told later."""
        if not run.versions.newest:
            return
        bounds, newest = run.queue.bounds(), (run.run_id, run.versions.newest)
        kept = any(one.maximum and one.maximum < run.versions.newest for one in bounds)
        serving = [one for one in self._state.serving(run.run_id) if kept or one.target != newest]
        if not serving:
            return
        may = [self._served(run, session) for session in serving if self._may_install(run, session, now)]
        for session_id, version in target_versions(may, bounds, run.versions.available).items():
            session = self._state.sessions[session_id]
            if version not in run.versions.available or session.target == (run.run_id, version):
                continue
            # Sent even if it attached with this version: the former coordinator may have sent another run's since.
            message = Install(
                version=run.versions.available[version],
                run_id=run.run_id,
                model=run.spec.model,
                publisher=self._public_key(run.run_id),
            )
            session.install(run.run_id, message, now, restart=self._changes.needed(run, session))

    def _served(self, run: RunState, session: WorkerSession) -> ServedVersion:
        return ServedVersion(
            session_id=session.session_id,
            installed=session.version_of(run.run_id),
            running=len(session.attempts),
            held=frozenset(bounds for _, bounds in session.held),
        )

    def _may_install(self, run: RunState, session: WorkerSession, now: float) -> bool:
        return (
            not session.draining
            and not session.given_up  # an install would disturb its host too
            and session.unfit.get(run.run_id, 0.0) <= now
            and not self._changes.forbids(run, session, now)
            and all(run_id == run.run_id for run_id, _ in session.held)
        )
