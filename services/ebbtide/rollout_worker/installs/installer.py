"""Installs the policy versions that the coordinator names as this worker's target.

Generation goes on during a pull; only the install pauses it. `install_states` defines the states in between.

Invariant: `current` is what the engine serves, whole. Only this module changes it, and admits no attempt meanwhile
(`installing`): so an attempt is judged by the version that makes its first token. At most one version is pulled or
installed at a time; the last target that comes meanwhile counts. The mirror is not locked while an install waits for
attempts to end: the version is verified and locked again before anything pauses. Nothing survives the process: a new
one asks for the version again, and finds what the mirror kept.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, InvalidRequest, Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.device_lease import DeviceLease
from ebbtide.rollout_worker.engine import Engine, EngineFailed
from ebbtide.rollout_worker.engine.changing_engine import ChangingEngine, EngineNotChanged
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.installs.install_states import (
    BUSY,
    DROPPABLE,
    HOLDING,
    SETTLED,
    Action,
    InstallEvent,
    InstallState,
    transition,
)
from ebbtide.rollout_worker.installs.weight_store import OtherArchitecture, TargetVersion, WeightStore
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.weights import Manifest
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire import to_proto

log = telemetry.get_logger(__name__)

_HOLD = "install"


class InstallReports:
    """Turns outcomes of installs into messages to the coordinator, log lines and metrics."""

    def __init__(self, send: Callable[[fleet_pb2.WorkerMessage], None]) -> None:
        self._send = send

    def installed(self, wanted: TargetVersion, pull_s: float, pause_s: float) -> None:
        """The engine serves a version; generation was held for `pause_s`."""
        log.info("installed", **wanted.names, pull_s=round(pull_s, 4), pause_s=round(pause_s, 4))
        done = fleet_pb2.Installed(version=_version(wanted), run_id=wanted.run_id, pull_s=pull_s, pause_s=pause_s)
        self._send(fleet_pb2.WorkerMessage(installed=done))

    def measured(self, pull_s: float, pause_s: float) -> None:
        """Count an install that did work."""
        metrics.INSTALLS.labels("installed").inc()
        metrics.PULL_SECONDS.observe(pull_s)
        metrics.PAUSE_SECONDS.observe(pause_s)
        metrics.PHASE_SECONDS.labels("pause").inc(pause_s)

    def refused(self, wanted: TargetVersion, error: EbbtideError) -> None:
        """A version could not be installed."""
        metrics.INSTALLS.labels("refused").inc()
        log.warning("version refused", **wanted.names, reason=str(error))
        failed = fleet_pb2.InstallFailed(
            version=_version(wanted),
            run_id=wanted.run_id,
            message=str(error),
            architecture=error.architecture if isinstance(error, OtherArchitecture) else "",
            unreachable=isinstance(error, Unavailable),
        )
        self._send(fleet_pb2.WorkerMessage(install_failed=failed))

    def engine_changed(self, wanted: TargetVersion, info: EngineInfo, seconds: float, *, failed: bool) -> None:
        """The engine was restarted and is now `info`; `failed`: not for the version wanted."""
        engine = to_proto(info, fleet_pb2.EngineInfo)
        changed = fleet_pb2.EngineChanged(engine=engine, run_id=wanted.run_id, seconds=seconds)
        self._send(fleet_pb2.WorkerMessage(engine_changed=changed))
        if not failed:
            metrics.ENGINE_STARTS.inc()
            log.info("engine changed", **wanted.names, model=info.model, seconds=round(seconds, 3))


def _version(wanted: TargetVersion) -> types_pb2.PolicyVersion:
    return to_proto(wanted.version, types_pb2.PolicyVersion)


class InstallNotNow(Unavailable):
    """The device may not be touched now. Nothing has changed; try again later."""


class Installer:
    """Brings the engine from one version to the next."""

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        attempts: LocalAttempts,
        reports: InstallReports,
        lender: DeviceLease | None = None,
        changing: ChangingEngine | None = None,
    ) -> None:
        """`lender`: of a borrowed device. `changing`: the engine, if it may be restarted for another architecture."""
        self._engine, self._store, self._attempts, self._reports = engine, store, attempts, reports
        self._lender, self._changing = lender, changing
        self._woken = asyncio.Event()  # set when the target may need work
        self._actions: dict[Action, Callable[[], None]] = {
            Action.HOLD: partial(attempts.holds.begin, _HOLD),
            Action.RELEASE: partial(attempts.holds.end, _HOLD),
            Action.TELL: attempts.holds.tell,
            Action.GIVE_BACK: self._give_back,
            Action.WAKE: self._woken.set,
        }
        self._state = InstallState.IDLE
        self._target: TargetVersion | None = None
        self._model = ""  # the model that the engine may be restarted for; empty: it may not
        self._stopped = False
        self._work: asyncio.Task[None] | None = None  # brings the target in
        self._over: set[str] = set()  # finished runs that still use something here
        self._emptied = False  # the engine gave its weights up and has none yet
        self.current: TargetVersion | None = None  # what the engine serves
        self.install_s = 0.0  # for which the last install held generation

    @property
    def installing(self) -> bool:
        """Whether the engine is changing from one version to another."""
        return self._state in HOLDING

    @property
    def busy(self) -> bool:
        """Whether a target is on its way."""
        return self._state in BUSY

    @property
    def restart_s(self) -> float:
        """Seconds that an engine start takes, for another architecture; 0: the engine may not be restarted."""
        return self._changing.restart_s if self._changing else 0.0

    def set_target(self, wanted: TargetVersion, change: str = "") -> None:
        """`change`: the model's name, if the engine may be restarted for the version."""
        self._target, self._model = wanted, change
        self._woken.set()
        self._attempts.ended.set()  # a waiting install looks again

    def forget(self, run_id: str) -> None:
        """A run is over: end its pull, let its install finish if it has begun, then free what the run uses."""
        if self._target is not None and self._target.run_id == run_id:
            self._target = None
            self._drop()
        self._attempts.ended.set()
        self._over.add(run_id)
        if self._state in SETTLED:
            self._give_back()

    def stop(self) -> None:
        """Begin nothing more. A pull ends here; an install that has begun goes on."""
        self._stopped = True
        self._woken.set()
        self._drop()

    def _drop(self) -> None:
        if self._work is not None and self._state in DROPPABLE:
            self._work.cancel()

    def _go(self, event: InstallEvent) -> None:
        self._state, actions = transition(self._state, event)
        for action in actions:
            self._actions[action]()

    def _give_back(self) -> None:
        while self._over:
            run_id = self._over.pop()
            if self.current is not None and self.current.run_id == run_id:
                self.current = None
            self._store.forget(run_id)

    async def run(self) -> None:
        """Install targets until stopped. Raises `EngineFailed` when an install destroys the engine."""
        while not self._stopped:
            await self._woken.wait()
            self._woken.clear()
            if self._stopped or self._target is None or self._state is not InstallState.IDLE:
                continue
            if self._target == self.current:
                self._reports.installed(self._target, 0.0, 0.0)
            else:
                await self._try(self._target)

    async def _try(self, target: TargetVersion) -> None:
        """Bring the target in, unless its run ends meanwhile."""
        self._go(InstallEvent.BEGIN)
        self._work = work = asyncio.create_task(self._bring(target), name="install")
        try:
            await work
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if not self._stopped:
                log.info("not installed: its run is over", **target.names)
        finally:
            self._work = None
            self._go(InstallEvent.END)

    async def _bring(self, wanted: TargetVersion) -> None:
        start = time.monotonic()
        try:
            may = self._changing.refusal if self._changing and self._model else None
            manifest = await self._store.begin(wanted, may)
            took = await self._replace(wanted, manifest, start)
        except EngineFailed:
            raise
        except EbbtideError as error:
            self._reports.refused(wanted, error)
            return
        if took is not None:
            self._store.announce(took[1])
            self._reports.measured(*took)
            self._reports.installed(wanted, *took)

    async def _replace(self, wanted: TargetVersion, manifest: Manifest, start: float) -> tuple[float, float] | None:
        """Pull a version, and install it once no attempt forbids it. Returns the seconds from `start` to the end of the
        pull and those for which generation was held; None if the target changed meanwhile."""
        pull_s = 0.0
        while self._target == wanted:
            async with self._store.locked(wanted, manifest) as (path, changes):
                pull_s = pull_s or time.monotonic() - start
                if await self._may_install(wanted):
                    return pull_s, await self._bring_in(wanted, manifest, path, changes)
            self._go(InstallEvent.FORBIDDEN)
            while self._target == wanted and not self._admits(wanted):
                self._attempts.ended.clear()
                await self._attempts.ended.wait()
            self._go(InstallEvent.ADMITTED)
        return None

    async def _may_install(self, wanted: TargetVersion) -> bool:
        """Whether a locked version is still the target, and no attempt forbids it once the device is lent."""
        if self._target != wanted or not self._admits(wanted):
            return False
        self._go(InstallEvent.LOCKED)
        if self._lender is not None:
            await self._lender.spell(self.install_s)
        return self._target == wanted and self._admits(wanted)

    def _admits(self, wanted: TargetVersion) -> bool:
        return self._attempts.admit(wanted.run_id, wanted.version)

    async def _bring_in(self, wanted: TargetVersion, manifest: Manifest, path: Path, changes: Path | None) -> float:
        """Install a locked version, into another engine if it does not fit this one."""
        engine = self._changing if not self._store.fits(manifest) else None
        self._go(InstallEvent.CHANGE if engine else InstallEvent.INSTALL)
        try:
            if engine:
                await self._change(engine, wanted, manifest, path)
                self._go(InstallEvent.INSTALL)
            return await self._install(wanted, manifest, path, changes)
        finally:
            self._go(InstallEvent.DONE)

    async def _change(self, engine: ChangingEngine, wanted: TargetVersion, manifest: Manifest, path: Path) -> None:
        """Restart the engine for the version's architecture. Nothing is generated meanwhile; all else goes on."""
        began, failure = time.monotonic(), None
        self.current = None
        self._store.serves(None)
        try:
            info = await engine.change(self._model, manifest.config, path)
        except EngineNotChanged as error:
            info, failure = error.info, error
        self._attempts.engine_changed(info)
        self._reports.engine_changed(wanted, info, time.monotonic() - began, failed=failure is not None)
        if failure is not None:
            raise OtherArchitecture(str(failure), manifest) from failure

    async def _install(self, wanted: TargetVersion, manifest: Manifest, path: Path, changes: Path | None) -> float:
        try:
            pause_s = await self._engine.install(wanted.version.version, path, changes)
        except InvalidRequest:
            self._store.refused(wanted.version)
            raise
        self.current, self.install_s, self._emptied = wanted, pause_s, False
        self._store.serves(manifest)
        return pause_s

    def rest(self) -> bool:
        """Install nothing until `restore`. False if that is impossible: no version is served, or another one comes."""
        if self.current is None or self._target != self.current or self._state is not InstallState.IDLE:
            return False
        self._go(InstallEvent.REST)
        self._emptied = True
        return True

    async def restore(self) -> None:
        """Load the version that the engine served, or the target by now. May be called again after an error.

        Raises what a pull or an install raises; then `run` installs the target. Raises `InstallNotNow`, and
        keeps resting, if the device may not be touched once the version is at hand."""
        if not self._emptied:
            return
        if self.busy:
            raise Unavailable("a version is on its way")
        self._go(InstallEvent.RESTORE)
        outcome = InstallEvent.NOT_NOW
        try:
            await self._come_back()
            outcome = InstallEvent.END
        except InstallNotNow:
            raise
        except EbbtideError:
            self.current, outcome = None, InstallEvent.END
            raise
        finally:
            self._go(outcome)

    async def _come_back(self) -> None:
        target, served = self._target, self.current
        if target is not None and target != served and self._admits(target):
            try:
                await self._load(target)
            except (EngineFailed, InstallNotNow):
                raise
            except EbbtideError as error:  # the next try reports it
                log.info("back to the version before", **target.names, reason=str(error))
            else:
                return
        if served is None:
            raise Unavailable("no version is installed")
        await self._load(served)

    async def _load(self, wanted: TargetVersion) -> None:
        manifest = await self._store.begin(wanted)
        async with self._store.locked(wanted, manifest) as (path, _):
            if self._lender is not None and not self._lender.may_wake():
                raise InstallNotNow("the host needs its memory, or its processor, again")
            another = wanted != self.current
            if another and not self._admits(wanted):
                raise Unavailable("rollouts of the version before have come")
            self._go(InstallEvent.INSTALL)
            try:
                pause_s = await self._install(wanted, manifest, path, None)
            finally:
                self._go(InstallEvent.DONE)
        if another:
            self._store.announce(pause_s)
