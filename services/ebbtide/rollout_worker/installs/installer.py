"""Installs the policy versions that the coordinator wishes for.

A version is pulled into the mirror while generation goes on; then generation pauses for the install alone. The states
in between are those of `install_states`.

Invariant: `current` is what the engine serves, whole. It changes only here, and while it does (`installing`) no attempt
is admitted: so an attempt is judged by the version that makes its first token. At most one version is pulled or
installed at a time; of several wishes that come meanwhile the last counts. The mirror is not locked while an install
waits for attempts to end: the version is verified, and locked, again before anything pauses. Nothing of this survives
the process: a new one asks for the version again, and finds what the mirror kept.
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
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.installs.engine_needs import OtherArchitecture
from ebbtide.rollout_worker.installs.install_messages import engine_changed_message, failed_message, installed_message
from ebbtide.rollout_worker.installs.install_states import (
    BUSY,
    DROPPABLE,
    HOLDING,
    SETTLED,
    Deed,
    InstallEvent,
    InstallState,
    transition,
)
from ebbtide.rollout_worker.installs.weight_store import Installation, WeightStore
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.weights import Manifest
from ebbtide.v1 import fleet_pb2

log = telemetry.get_logger(__name__)

_HOLD = "install"


class InstallLender(Protocol):
    """Who lends the device: see `DeviceLease`."""

    async def spell(self, seconds: float) -> None:
        """Wait for a time in which the engine may be touched for so long, but not for ever."""
        ...

    def may_wake(self) -> bool:
        """Whether an engine that gave its weights up may load them now."""
        ...


class InstallNotNow(Unavailable):
    """The device may not be touched at this moment: nothing has changed, and it is to be asked again."""


class Installer:
    """Brings the engine from one version to the next."""

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        attempts: LocalAttempts,
        report: Callable[[fleet_pb2.WorkerMessage], None],
        lender: InstallLender | None = None,
        changing: ChangingEngine | None = None,
    ) -> None:
        """`lender`: of the device, if it is borrowed. `changing`: the engine, if it may be started anew."""
        self._engine, self._store, self._attempts, self._report = engine, store, attempts, report
        self._lender, self._changing = lender, changing
        self._state = InstallState.IDLE
        self._wish: Installation | None = None
        self._model = ""  # for which the engine may be started anew for the wish; empty: it may not
        self._woken = asyncio.Event()  # set when the wish is to be looked at
        self._stopped = False
        self._work: asyncio.Task[None] | None = None  # the wish that is being fulfilled
        self._over: set[str] = set()  # runs that are over, and of which something is still in use
        self._emptied = False  # the engine gave its weights up, and has got none since
        #: What the engine serves.
        self.current: Installation | None = None
        #: Seconds for which the last install held generation.
        self.install_s = 0.0

    @property
    def installing(self) -> bool:
        """Whether the engine is changing from one version to another."""
        return self._state in HOLDING

    @property
    def busy(self) -> bool:
        """Whether a version that was wished for is on its way."""
        return self._state in BUSY

    @property
    def restart_s(self) -> float:
        """Seconds that a start of the engine takes, for another architecture; 0: it may not be."""
        return self._changing.restart_s if self._changing else 0.0

    # -- what it is told -----------------------------------------------------------------------------------------

    def wish(self, wanted: Installation, change: str = "") -> None:
        """`change`: the model's name, if the engine may be started anew for the version."""
        self._wish, self._model = wanted, change
        self._woken.set()
        self._attempts.ended.set()  # an install that waits looks again

    def forget(self, run_id: str) -> None:
        """A run is over: give back what is here of it, behind an install of it that has begun. A pull ends here."""
        if self._wish is not None and self._wish.run_id == run_id:
            self._wish = None
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

    # -- its states ----------------------------------------------------------------------------------------------

    def _go(self, event: InstallEvent) -> None:
        self._state, deeds = transition(self._state, event)
        for deed in deeds:
            self._do(deed)

    def _do(self, deed: Deed) -> None:
        match deed:
            case Deed.HOLD:
                self._attempts.holds.begin(_HOLD)
            case Deed.RELEASE:
                self._attempts.holds.end(_HOLD)
            case Deed.TELL:
                self._attempts.holds.tell()
            case Deed.GIVE_BACK:
                self._give_back()
            case Deed.WAKE:
                self._woken.set()

    def _give_back(self) -> None:
        while self._over:
            run_id = self._over.pop()
            if self.current is not None and self.current.run_id == run_id:
                self.current = None
            self._store.forget(run_id)

    # -- a wish --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Install what is wished for, until told to stop. Raises `EngineFailed` when the engine is lost over it."""
        while not self._stopped:
            await self._woken.wait()
            self._woken.clear()
            if self._stopped or self._wish is None or self._state is not InstallState.IDLE:
                continue
            if self._wish == self.current:
                self._say_installed(self._wish, 0.0, 0.0)
            else:
                await self._try(self._wish)

    async def _try(self, wish: Installation) -> None:
        """Fulfil it, unless its run ends meanwhile."""
        self._go(InstallEvent.BEGIN)
        self._work = work = asyncio.create_task(self._fulfil(wish), name="install")
        try:
            await work
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if not self._stopped:
                log.info("not installed: its run is over", **_names(wish))
        finally:
            self._work = None
            self._go(InstallEvent.END)

    async def _fulfil(self, wanted: Installation) -> None:
        start = time.monotonic()
        try:
            may = self._changing.refusal if self._changing and self._model else None
            manifest = await self._store.begin(wanted, may)
            took = await self._replace(wanted, manifest, start)
        except EngineFailed:
            raise
        except EbbtideError as error:
            metrics.INSTALLS.labels("refused").inc()
            log.warning("version refused", **_names(wanted), reason=str(error))
            self._report(failed_message(wanted, error))
            return
        if took is None:
            return
        pull_s, pause_s = took
        metrics.INSTALLS.labels("installed").inc()
        metrics.PULL_SECONDS.observe(pull_s)
        metrics.PAUSE_SECONDS.observe(pause_s)
        metrics.PHASE_SECONDS.labels("pause").inc(pause_s)
        self._store.announce(pause_s)
        self._say_installed(wanted, pull_s, pause_s)

    def _say_installed(self, wanted: Installation, pull_s: float, pause_s: float) -> None:
        log.info("installed", **_names(wanted), pull_s=round(pull_s, 4), pause_s=round(pause_s, 4))
        self._report(installed_message(wanted, pull_s, pause_s))

    async def _replace(self, wanted: Installation, manifest: Manifest, start: float) -> tuple[float, float] | None:
        """Pull a version, and install it as soon as no attempt forbids it. Returns the seconds from `start` to the end
        of the pull and those for which generation was held; None if something else was wished for meanwhile."""
        pull_s = 0.0
        while self._wish == wanted:
            async with self._store.locked(wanted, manifest) as (path, changes):
                pull_s = pull_s or time.monotonic() - start
                if await self._may_install(wanted):
                    return pull_s, await self._bring_in(wanted, manifest, path, changes)
            self._go(InstallEvent.FORBIDDEN)
            while self._wish == wanted and not self._admits(wanted):
                self._attempts.ended.clear()
                await self._attempts.ended.wait()
            self._go(InstallEvent.ADMITTED)
        return None

    async def _may_install(self, wanted: Installation) -> bool:
        """Whether a locked version is still wished for, and no attempt forbids it once the lender lends the device."""
        if self._wish != wanted or not self._admits(wanted):
            return False
        self._go(InstallEvent.LOCKED)
        if self._lender is not None:
            await self._lender.spell(self.install_s)
        return self._wish == wanted and self._admits(wanted)

    def _admits(self, wanted: Installation) -> bool:
        return self._attempts.admit(wanted.run_id, wanted.version)

    # -- the engine ----------------------------------------------------------------------------------------------

    async def _bring_in(self, wanted: Installation, manifest: Manifest, path: Path, changes: Path | None) -> float:
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

    async def _change(self, engine: ChangingEngine, wanted: Installation, manifest: Manifest, path: Path) -> None:
        """Start the engine anew for the version's architecture. Nothing is generated meanwhile; all else goes on."""
        began = time.monotonic()
        self.current = None
        self._store.serves(None)
        try:
            info = await engine.change(self._model, manifest.config, path)
        except EngineNotChanged as error:
            self._say_changed(wanted.run_id, error.info, time.monotonic() - began)
            raise OtherArchitecture(str(error), manifest) from error
        self._say_changed(wanted.run_id, info, time.monotonic() - began)
        metrics.ENGINE_STARTS.inc()
        log.info("engine changed", **_names(wanted), model=info.model, seconds=round(time.monotonic() - began, 3))

    def _say_changed(self, run_id: str, info: EngineInfo, seconds: float) -> None:
        self._attempts.info = info
        self._report(engine_changed_message(run_id, info, seconds))

    async def _install(self, wanted: Installation, manifest: Manifest, path: Path, changes: Path | None) -> float:
        try:
            pause_s = await self._engine.install(wanted.version.version, path, changes)
        except InvalidRequest:
            self._store.refused(wanted.version)
            raise
        self.current, self.install_s, self._emptied = wanted, pause_s, False
        self._store.serves(manifest)
        return pause_s

    # -- weights that are given up -------------------------------------------------------------------------------

    def rest(self) -> bool:
        """Install nothing until `restore`, for the engine gives its weights up; False if that cannot be now: because
        it has none of a version, or another one is on its way."""
        if self.current is None or self._wish != self.current or self._state is not InstallState.IDLE:
            return False
        self._go(InstallEvent.REST)
        self._emptied = True
        return True

    async def restore(self) -> None:
        """Put the version that the engine served into it again, or the one that is wished for by now. Raises what a
        pull or an install does; then whatever is wished for is installed instead, and this may be asked again. Raises
        `InstallNotNow`, and goes on resting, if the device is not to be touched once all is at hand."""
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
        wish, served = self._wish, self.current
        if wish is not None and wish != served and self._admits(wish):
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


def _names(wanted: Installation) -> dict[str, str | int]:
    return {"run_id": wanted.run_id, "policy": wanted.version.policy, "version": wanted.version.version}
