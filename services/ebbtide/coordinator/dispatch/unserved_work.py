"""Finds runs and rollouts that no worker can serve, and warns of runs that wait for one.

Lost with the process: a run without workers is warned of again, and a worker that scores prompts has its time to attach
again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ebbtide import telemetry
from ebbtide.coordinator.dispatch.installs import EngineChanges, fits_nowhere, unservable
from ebbtide.coordinator.fleet.worker_health import WorkerTrust
from ebbtide.coordinator.fleet.worker_registry import SCORERS
from ebbtide.coordinator.rules.placement import outlived, outsized
from ebbtide.coordinator.rules.rollout_queue import unscored
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.run import RunEvent

log = telemetry.get_logger(__name__)
#: How long a worker with a longer context has to attach for rollouts that need one.
_LONGER_GRACE_S: Final = 30.0
#: The same for a worker that scores prompts, from the loss of the last one on.
_SCORER_GRACE_S: Final = 30.0
#: A run without workers warns after so long: replacing a worker takes less.
_LACKING_S: Final = 1.0


class DeadLetters(NamedTuple):
    """Rollouts to end as dead letters, if they are still queued: (rollout, why)."""

    run: RunState
    letters: Sequence[tuple[str, str]]


class RunFailure(NamedTuple):
    """A run to end as failed."""

    run: RunState
    message: str


class UnservedWork:
    def __init__(
        self, state: CoordinatorState, trust: WorkerTrust, changes: EngineChanges, run_events: RunEvents
    ) -> None:
        self._state, self._trust, self._changes, self._run_events = state, trust, changes, run_events
        self._scorerless = math.inf  # since when there are workers, and none that scores prompts; inf: not now
        #: Run and what it lacks -> since when; inf after its warning.
        self._lacking: dict[tuple[str, str], float] = {}

    def actions(self, run: RunState, now: float, *, measure: bool) -> Iterator[DeadLetters | RunFailure]:
        """The run's end if no worker can install its weights; else the dead letters of its queue. `measure`: also of
        rollouts that are too long, or to be scored where nobody scores; and look for longer contexts.
        """
        if measure:
            self.note_context(run)
        if message := self._misfit(run, now):
            yield RunFailure(run, message)
        if not run.ended and (letters := _unservable(run)):
            yield DeadLetters(run, letters)
        if measure and not run.ended and (letters := [*self._outsized(run, now), *self._unscored(run, now)]):
            yield DeadLetters(run, letters)

    def warn_if_lacking(self, run: RunState, now: float, *, measure: bool) -> None:
        """Warn once each time a run has work that no worker may serve. `measure`: also of too long rollouts."""
        no_worker = self._trust.lacking(now) or self._barred(run) if run.queue or run.running else ""
        self._warn(run, "workers", no_worker, now)
        if measure:
            self._warn(run, "context", self._cramped(run), now)

    def _warn(self, run: RunState, what: str, text: str, now: float) -> None:
        """Warn of what a run lacks once it has done so for a while; empty `text`: it does not."""
        if not text:
            self._lacking.pop((run.run_id, what), None)
        elif now - self._lacking.setdefault((run.run_id, what), now) >= _LACKING_S:
            self._lacking[run.run_id, what] = math.inf
            waiting = len(run.queue) + len(run.running)
            log.warning("no workers", run_id=run.run_id, rollouts=waiting)
            message = f"{text}; {waiting} rollouts resume when one comes"
            self._run_events.write(run, RunEvent(kind="warning", message=message, values={"rollouts": waiting}))

    def note_context(self, run: RunState) -> None:
        """Have responses end in the longest context that was attached since, and warn that former ones ended before."""
        if run.spec.max_model_len or not run.context:
            return
        ready = (one for one in self._state.serving(run.run_id) if one.version_of(run.run_id))
        architectures = {session.hello.engine.architecture for session in ready}
        contexts = (self._state.longest_context(run.run_id, one) for one in architectures)
        longest, before = max(contexts, default=0), run.context
        if longest > before:
            run.note_context(longest)
            message = (
                f"a worker with a longer context came: responses end at {longest} tokens of prompt and response from "
                f"now on, and those of rollouts that run at {before}; set the run's max_model_len to have them alike"
            )
            self._run_events.write(run, RunEvent(kind="warning", key=f"context.{longest}", message=message))

    def forget_ended(self) -> None:
        """Drop what is remembered of runs that are over."""
        self._lacking = {key: since for key, since in self._lacking.items() if key[0] in self._state.runs}

    def _open_sessions(self) -> list[WorkerSession]:
        """Workers that stay. Quarantined ones are among them: they pull weights, but get no rollouts."""
        return [session for session in self._state.sessions.values() if not session.draining]

    def _misfit(self, run: RunState, now: float) -> str:
        """Why the run ends, if no attached worker can install its weights; else ""."""
        if not run.versions.misfits:
            return ""
        engines = [session.hello.engine for session in self._open_sessions()]
        attached = [engine.architecture for engine in engines]
        if run.versions.architecture and self._changes.served_by_somebody(run, now):
            return ""
        if not any(fits_nowhere(architecture, attached, tries) for architecture, tries in run.versions.misfits.items()):
            return ""
        serve = ", ".join(sorted({engine.model for engine in engines}))
        return (
            f"its weights are of another architecture than the model of any worker: it names {run.spec.model}, "
            f"the workers serve {serve}; start workers with the run's model, then submit it again"
        )

    def _outsized(self, run: RunState, now: float) -> list[tuple[str, str]]:
        sessions = self._open_sessions()
        longest, manned = _longest(sessions), min((session.attached for session in sessions), default=0.0)
        if run.context > longest:  # its user says that such a worker comes, or one was there: they wait
            return []
        long = run.queue.not_shorter(longest)
        why = (
            "{} tokens leave no room for more in the longest context attached ({}); attach a worker with a longer one, "
            "and set the run's max_model_len to have rollouts wait for it"
        )
        found = outsized(long, longest, manned=manned, now=now, grace_s=_LONGER_GRACE_S)
        return [(one.rollout_id, why.format(one.length, longest)) for one in found]

    def _unscored(self, run: RunState, now: float) -> list[tuple[str, str]]:
        """The rollouts that wait to be scored while there are workers, and none of them can."""
        if not (scoring := run.queue.scoring()):
            return []
        sessions = self._open_sessions()
        if not sessions or any(session.scores_prompts for session in sessions):
            self._scorerless = math.inf
            return []
        self._scorerless = min(self._scorerless, now)
        why = f"no attached worker has scored prompts for {_SCORER_GRACE_S:g} s; {SCORERS}"
        given_up = unscored(scoring, self._scorerless, now=now, grace_s=_SCORER_GRACE_S)
        return [(one.rollout_id, why) for one in given_up]

    def _barred(self, run: RunState) -> str:
        """Why a run that may borrow nothing has no worker."""
        if run.spec.borrow.max_rollouts != 0 or any(not session.borrowed for session in self._open_sessions()):
            return ""
        return "waits for workers: borrow.max_rollouts is 0 and only borrowed ones are attached; submit it with more"

    def _cramped(self, run: RunState) -> str:
        """Why rollouts of a run wait whose context no worker has."""
        longest = _longest(self._open_sessions())
        long = run.queue.not_shorter(longest)
        if run.context <= longest:
            long = [one for one in long if outlived(one, longest)]
        if not long:
            return ""
        context = max(run.context, *(one.length + 1 for one in long))
        return (
            f"waits for a worker with a longer context: {len(long)} rollouts fill the longest attached ({longest}); "
            f"raise a worker's max_model_len to the run's ({context})"
        )


def _longest(sessions: Sequence[WorkerSession]) -> int:
    """The longest context, in tokens; 0 without a worker."""
    return max((session.hello.engine.max_model_len for session in sessions), default=0)


def _unservable(run: RunState) -> list[tuple[str, str]]:
    old = [bounds for bounds in run.queue.bounds() if bounds.maximum and bounds.maximum < run.versions.newest]
    lost = {bounds for bounds in old if unservable(bounds, run.versions.available)}
    if not lost:
        return []
    why = "no policy version in [{0.minimum}, {0.maximum}] can be had any more"
    return [(one.rollout_id, why.format(one.bounds)) for one in run.queue if one.bounds in lost]
