"""Defines the recorded calls of workers' sessions, and of what is remembered of workers beyond them."""

from ebbtide.coordinator.recording.model_call import ModelCall, ReplayModel
from ebbtide.coordinator.state.worker_reports import AttachReport, HeartbeatReport
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.weights import PolicyVersion


class SessionMade(ModelCall, frozen=True):
    session: str
    hello: AttachReport
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.keep_session(model.state.new_session(self.session, self.hello, self.now))


class SessionAttached(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.state.attach(model.session(self.session))


class SessionDetached(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.state.detach(model.session(self.session))


class HeartbeatHeard(ModelCall, frozen=True):
    session: str
    beat: HeartbeatReport
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).hear(self.beat, self.now)


class WorkerDrains(ModelCall, frozen=True):
    session: str
    reason: str

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).drain(self.reason)


class MessageCame(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).message_came()


class TokensCame(ModelCall, frozen=True):
    session: str
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).tokens_came(self.now)


class MessageAnswered(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).message_answered()


class ServingKept(ModelCall, frozen=True):
    session: str
    run: str
    version: PolicyVersion

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).keep_serving(self.run, self.version)


class VersionInstalled(ModelCall, frozen=True):
    session: str
    run: str
    version: PolicyVersion

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).note_installed(self.run, self.version)


class InstallFailureNoted(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).note_install_failed()


class EngineRestarted(ModelCall, frozen=True):
    session: str
    engine: EngineInfo

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).note_restarted(self.engine)


class VersionDistrusted(ModelCall, frozen=True):
    session: str

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).distrust_version()


class RunBarred(ModelCall, frozen=True):
    session: str
    run: str
    until: float

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).bar(self.run, self.until)


class ArchitectureRefused(ModelCall, frozen=True):
    session: str
    architecture: str
    until: float

    def apply(self, model: ReplayModel) -> None:
        model.session(self.session).refuse(self.architecture, self.until)


class ChangeoverNoted(ModelCall, frozen=True):
    worker: str
    seconds: float

    def apply(self, model: ReplayModel) -> None:
        model.state.note_changeover(self.worker, self.seconds)


class WorkerAttached(ModelCall, frozen=True):
    worker: str
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.trust.attached(self.worker, self.now)


class WorkerLeft(ModelCall, frozen=True):
    worker: str

    def apply(self, model: ReplayModel) -> None:
        model.trust.left(self.worker)


class WorkerLost(ModelCall, frozen=True):
    worker: str
    now: float

    def apply(self, model: ReplayModel) -> None:
        model.trust.lost(self.worker, self.now)
