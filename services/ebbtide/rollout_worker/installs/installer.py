"""Policy versions: which one the engine serves, and the way to the next.

Two phases: a version is pulled into the mirror while generation goes on; then generation pauses for the install alone.

Invariant: `current` is what the engine serves, whole; it changes only here, and while it does (`installing`) no
attempt is admitted: so an attempt is judged by the version that its first token will be made by. At most one version
is pulled or installed at a time; of several wished for meanwhile the last counts. While an install waits for attempts
to end, other workers of the host may move the mirror on: it is looked at again, and locked, before anything pauses.
Nothing of this survives the process: a new one asks for the version again, and finds what the mirror kept.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine, EngineFailed
from ebbtide.rollout_worker.engine.changing_engine import ChangingEngine, EngineNotChanged
from ebbtide.rollout_worker.engine.checkpoint_facts import architecture
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.installs.relay_presence import RelayPresence
from ebbtide.rollout_worker.installs.version_store import Installation, OtherArchitecture, VersionStore
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.weights import Manifest
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire.record_conversion import to_proto

log = telemetry.get_logger(__name__)


class InstallLender(Protocol):
    """Who lends the device: see `Borrowing`."""

    async def spell(self, seconds: float) -> None:
        """Wait for a time in which the engine may be touched for so long, but not for ever."""
        ...

    def may_wake(self) -> bool:
        """Whether an engine that gave its weights up may load them now."""
        ...


class InstallNotNow(Unavailable):
    """The device is somebody else's at this moment: nothing has changed, and it is to be asked again."""


class Installer:
    """Pulls and installs what the coordinator wishes for."""

    def __init__(
        self,
        engine: Engine,
        weights: VersionStore,
        attempts: LocalAttempts,
        presence: RelayPresence,
        report: Callable[[fleet_pb2.WorkerMessage], None],
        lender: InstallLender | None = None,
        changing: ChangingEngine | None = None,
    ) -> None:
        """`lender`: of the device, if it is borrowed. `changing`: the engine, if it may be started anew."""
        self._changing = changing
        self._asked = ""  # the model's name of a wish for which the engine may be started anew
        #: Told what the engine is from now on.
        self.changed: Callable[[EngineInfo], None] = lambda _: None
        self._lender = lender
        self._took_s = 0.0  # by the last install
        self._engine, self._weights, self._attempts = engine, weights, attempts
        self._presence, self._report = presence, report
        self._wish: Installation | None = None
        self._wished = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._work: asyncio.Task[None] | None = None  # the wish that is being fulfilled
        self._over: set[str] = set()  # runs that are over, and of which something is still in use
        self._restoring = False
        self._home = asyncio.Event()
        self._home.set()
        self._away = False  # the engine gave its weights up
        self.current: Installation | None = None
        self.busy = False

    @property
    def installing(self) -> bool:
        """Whether the engine is changing from one version to another."""
        return "install" in self._attempts.holds

    @property
    def install_s(self) -> float:
        """Seconds for which the last install held generation."""
        return self._took_s

    @property
    def restart_s(self) -> float:
        """Seconds that a start of the engine takes, for another architecture; 0: it may not be."""
        return self._changing.restart_s if self._changing else 0.0

    def wish(self, wanted: Installation, change: str = "") -> None:
        """`change`: the model's name, if the engine may be started anew for the version."""
        self._wish, self._asked = wanted, change
        self._wished.set()
        self._attempts.ended.set()  # an install that waits looks again

    def forget(self, run_id: str) -> None:
        """A run is over: give back what is here of it, behind an install of it that has begun. A pull ends here."""
        if self._wish is not None and self._wish.run_id == run_id:
            self._wish = None
            if self._work is not None and not self.installing:
                self._work.cancel()
        self._attempts.ended.set()
        self._over.add(run_id)
        if self._work is None:
            self._give_back()

    def _give_back(self) -> None:
        """What is left of runs that are over; nothing of it may be in use."""
        if self._restoring:
            return
        while self._over:
            run_id = self._over.pop()
            if self.current is not None and self.current.run_id == run_id:
                self.current = None
            self._weights.forget(run_id)
            self._presence.forget()

    def stop(self) -> None:
        """Begin nothing more. A pull ends here; an install that has begun goes on."""
        self._stopped = True
        if self._task is not None and not self.installing:
            self._task.cancel()

    async def run(self) -> None:
        """Install what is wished for, until told to stop. Raises `EngineFailed` when the engine is lost over it."""
        self._task = asyncio.current_task()
        try:
            while not self._stopped:
                await self._wished.wait()
                await self._home.wait()
                self._wished.clear()
                if self._wish is not None:
                    self._be_busy(busy=self._wish != self.current)
                    await self._try(self._wish)
                    self._be_busy(busy=False)
                self._give_back()
        finally:
            self.busy = False

    async def _try(self, wish: Installation) -> None:
        """Fulfil it, unless its run ends meanwhile."""
        self._work = work = asyncio.create_task(self._fulfil(wish), name="install")
        try:
            await work
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            log.info("not installed: its run is over", **_names(wish))
        finally:
            self._work = None

    def rest(self) -> bool:
        """Install nothing until `restore`, for the engine gives its weights up; False if that cannot be now: because
        it has none of a version, or another one is on its way."""
        if self.current is None or self.busy or self._wish != self.current:
            return False
        self._home.clear()
        self._away = True
        return True

    async def restore(self) -> None:
        """Put the version that the engine served into it again, or the one that is wished for by now. Raises what a
        pull or an install does; then whatever is wished for is installed instead, and this may be asked again. Raises
        `InstallNotNow`, and goes on resting, if the device is not to be touched once all is at hand."""
        if not self._away:
            return
        self._restoring = True
        try:
            await self._come_back()
        except InstallNotNow:
            raise
        except EbbtideError:
            self.current = None
            self._go_on()
            raise
        finally:
            self._restoring = False
            if self._work is None:
                self._give_back()
        self._go_on()

    async def _come_back(self) -> None:
        wish, served = self._wish, self.current
        if wish is not None and wish != served and self._attempts.admit(wish.run_id, wish.version):
            try:
                await self._load(wish)
            except (EngineFailed, InstallNotNow):
                raise
            except EbbtideError as error:  # it is reported when it is tried again, behind this
                log.info("back to the version before", **_names(wish), reason=str(error))
            else:
                return
        if served is None:
            raise Unavailable("no version is installed")
        await self._load(served)

    async def _load(self, wanted: Installation) -> None:
        manifest = await self._weights.prepare(wanted)
        async with self._weights.ready(wanted, manifest) as (path, _):
            if self._lender is not None and not self._lender.may_wake():
                raise InstallNotNow("the host needs its memory, or its processor, again")
            another = wanted != self.current
            if another and not self._attempts.admit(wanted.run_id, wanted.version):
                raise Unavailable("rollouts of the version before have come")
            pause_s = await self._install(wanted, manifest, path, None)
        if another:
            self._presence.installed(pause_s)

    def _go_on(self) -> None:
        self._home.set()
        self._wished.set()

    def _be_busy(self, *, busy: bool) -> None:
        if busy != self.busy:
            self.busy = busy
            self._attempts.holds.tell()

    async def _fulfil(self, wanted: Installation) -> None:
        pull_s = pause_s = 0.0
        try:
            if wanted != self.current:
                start = time.monotonic()
                may = self._changing.refusal if self._changing and self._asked else None
                manifest = await self._weights.prepare(wanted, may)
                pull_s = time.monotonic() - start
                if (paused := await self._replace(wanted, manifest)) is None:
                    return
                pause_s = paused
                metrics.INSTALLS.labels("installed").inc()
                metrics.PULL_SECONDS.observe(pull_s)
                metrics.PAUSE_SECONDS.observe(pause_s)
                metrics.PHASE_SECONDS.labels("pause").inc(pause_s)
                self._presence.installed(pause_s)
        except EngineFailed:
            raise
        except EbbtideError as error:
            self._refused(wanted, error)
            return
        log.info("installed", **_names(wanted), pull_s=round(pull_s, 4), pause_s=round(pause_s, 4))
        done = fleet_pb2.Installed(version=_message(wanted), run_id=wanted.run_id, pull_s=pull_s, pause_s=pause_s)
        self._report(fleet_pb2.WorkerMessage(installed=done))

    async def _replace(self, wanted: Installation, manifest: Manifest) -> float | None:
        """Install it as soon as no attempt forbids it; None if something else was wished for meanwhile."""
        while self._wish == wanted:
            self._attempts.ended.clear()
            if not self._attempts.admit(wanted.run_id, wanted.version):
                await self._attempts.ended.wait()
                continue
            async with self._weights.ready(wanted, manifest) as (path, changes):
                if self._lender is not None:
                    await self._lender.spell(self._took_s)
                # Meanwhile others may have begun that forbid it.
                if self._wish == wanted and self._attempts.admit(wanted.run_id, wanted.version):
                    if not self._weights.fits(manifest):
                        await self._change(wanted, manifest, path)
                    return await self._install(wanted, manifest, path, changes)
        return None

    async def _change(self, wanted: Installation, manifest: Manifest, path: Path) -> None:
        """Start the engine anew for the version's architecture. Nothing is generated meanwhile; all else goes on."""
        if self._changing is None:
            raise Unavailable("the engine may not be started anew")
        began = time.monotonic()
        with self._attempts.holds.during("install"):
            self.current = self._weights.installed = None
            try:
                info = await self._changing.change(self._asked, manifest.config, path)
            except EngineNotChanged as error:
                self._tell_changed(wanted.run_id, error.info, time.monotonic() - began)
                found = {entry.name: entry.full_shape for entry in manifest.tensors}
                raise OtherArchitecture(str(error), architecture=architecture(found)) from error
            self._tell_changed(wanted.run_id, info, time.monotonic() - began)
        metrics.ENGINE_STARTS.inc()
        log.info("engine changed", **_names(wanted), model=info.model, seconds=round(time.monotonic() - began, 3))

    def _tell_changed(self, run_id: str, info: EngineInfo, seconds: float) -> None:
        self.changed(info)
        told = fleet_pb2.EngineChanged(engine=to_proto(info, fleet_pb2.EngineInfo), run_id=run_id, seconds=seconds)
        self._report(fleet_pb2.WorkerMessage(engine_changed=told))

    async def _install(self, wanted: Installation, manifest: Manifest, path: Path, changes: Path | None) -> float:
        with self._attempts.holds.during("install"):
            try:
                pause_s = await self._engine.install(wanted.version.version, path, changes)
            except InvalidRequest:
                self._weights.refused(wanted.version)
                raise
            self.current, self._weights.installed, self._away = wanted, manifest, False
            self._took_s = pause_s
        return pause_s

    def _refused(self, wanted: Installation, error: EbbtideError) -> None:
        metrics.INSTALLS.labels("refused").inc()
        log.warning("version refused", **_names(wanted), reason=str(error))
        architecture = error.architecture if isinstance(error, OtherArchitecture) else ""
        failed = fleet_pb2.InstallFailed(
            version=_message(wanted),
            run_id=wanted.run_id,
            message=str(error),
            architecture=architecture,
            unreachable=isinstance(error, Unavailable),
        )
        self._report(fleet_pb2.WorkerMessage(install_failed=failed))


def _message(wanted: Installation) -> types_pb2.PolicyVersion:
    return to_proto(wanted.version, types_pb2.PolicyVersion)


def _names(wanted: Installation) -> dict[str, str | int]:
    return {"run_id": wanted.run_id, "policy": wanted.version.policy, "version": wanted.version.version}
