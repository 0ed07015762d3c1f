"""Defines the recorded calls of runs and their attempts."""

from ebbtide.coordinator.recording.model_call import ModelCall, ReplayModel
from ebbtide.coordinator.state.running_attempt import OrphanedAttempt
from ebbtide.errors import Internal
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.types.run import RunSpec
from ebbtide.types.weights import PolicyVersion


class RunAdded(ModelCall, frozen=True):
    run: str
    spec: RunSpec

    def apply(self, model: ReplayModel) -> None:
        model.keep_run(model.state.add_run(self.run, self.spec))


class RunDropped(ModelCall, frozen=True):
    run: str

    def apply(self, model: ReplayModel) -> None:
        model.state.drop_run(model.run(self.run))


class LoadShed(ModelCall, frozen=True):
    level: int

    def apply(self, model: ReplayModel) -> None:
        model.state.shed(self.level)


class RunPaused(ModelCall, frozen=True):
    run: str
    message: str
    now: float | None

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).pause(Internal(self.message), self.now)


class StaleSet(ModelCall, frozen=True):
    run: str
    stale: bool

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).set_stale(self.stale)


class RunReread(ModelCall, frozen=True):
    """The mirror took over what the store has. `running`: serial numbers of attempts."""

    run: str
    versions: list[PolicyVersion]
    queued: list[QueuedRollout]
    running: list[int]

    def apply(self, model: ReplayModel) -> None:
        run = model.run(self.run)
        queue = run.new_queue()
        for one in self.queued:
            queue.add(one)
        versions = {one.version: one for one in self.versions}
        attempts = map(model.attempt, self.running)
        run.reread(versions, queue, {one.rollout.rollout_id: one for one in attempts})


class ContextNoted(ModelCall, frozen=True):
    run: str
    tokens: int

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_context(self.tokens)


class Admitted(ModelCall, frozen=True):
    run: str
    rollout: QueuedRollout

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).admit(self.rollout)


class QueuedTaken(ModelCall, frozen=True):
    run: str
    rollout: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).take_queued(self.rollout)


class AttemptMade(ModelCall, frozen=True):
    """An attempt was made. They are numbered in this order, from 1 on."""

    run: str
    attempt_id: str
    rollout: QueuedRollout
    start: int
    max_tokens: int
    number: int
    given: float
    orphaned: OrphanedAttempt | None

    def apply(self, model: ReplayModel) -> None:
        run = model.run(self.run)
        attempt = run.new_attempt(
            self.attempt_id,
            self.rollout,
            start=self.start,
            max_tokens=self.max_tokens,
            number=self.number,
            given=self.given,
            orphaned=self.orphaned,
        )
        model.keep_attempt(attempt)


class AttemptStarted(ModelCall, frozen=True):
    run: str
    attempt: int
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).start(model.attempt(self.attempt), model.session(self.session))


class PutBack(ModelCall, frozen=True):
    run: str
    attempt: int
    queued: QueuedRollout | None

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).put_back(model.attempt(self.attempt), self.queued)


class RolloutEnded(ModelCall, frozen=True):
    run: str
    rollout: str
    attempt_id: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).end(self.rollout, self.attempt_id)


class RolloutFinished(ModelCall, frozen=True):
    run: str
    rollout: str
    attempt_id: str
    durable_before: float

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).finish(self.rollout, self.attempt_id, durable_before=self.durable_before)


class FinishesForgotten(ModelCall, frozen=True):
    run: str
    durable_before: float

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).unfinish(self.durable_before)


class TokensStored(ModelCall, frozen=True):
    """Tokens of each attempt that the store has (0 for one that the mirror does not know)."""

    run: str
    attempts: list[int]
    ends: list[int]

    def apply(self, model: ReplayModel) -> None:
        attempts = [model.attempt(serial) if serial else None for serial in self.attempts]
        model.run(self.run).accept_tokens(attempts, self.ends)


class EpisodeForgotten(ModelCall, frozen=True):
    run: str
    episode: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).forget_episode(self.episode)


class RunDoubted(ModelCall, frozen=True):
    run: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).doubt()


class RunReconciled(ModelCall, frozen=True):
    run: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_reconciled()


class AttemptUnconfirmed(ModelCall, frozen=True):
    run: str
    attempt: int
    due: float
    newer: bool

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).unconfirm(model.attempt(self.attempt), self.due, newer=self.newer)


class AttemptConfirmed(ModelCall, frozen=True):
    run: str
    rollout: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).confirm(self.rollout)


class UnconfirmedDropped(ModelCall, frozen=True):
    run: str
    attempt: int

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).drop_unconfirmed(model.attempt(self.attempt))


class VersionAnnounced(ModelCall, frozen=True):
    run: str
    version: PolicyVersion

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).announce(self.version)


class InstallNoted(ModelCall, frozen=True):
    run: str
    version: int
    architecture: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_installed(self.version, self.architecture)


class ArchitectureNoted(ModelCall, frozen=True):
    run: str
    architecture: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_architecture(self.architecture)


class MisfitNoted(ModelCall, frozen=True):
    run: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_misfit()


class FailedInstallNoted(ModelCall, frozen=True):
    run: str
    version: int

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_failed_install(self.version)


class TokensNoted(ModelCall, frozen=True):
    run: str

    def apply(self, model: ReplayModel) -> None:
        model.run(self.run).note_tokens_stored()
