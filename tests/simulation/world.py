"""The simulated world: every service in a process of its own, and what starts them again."""

import itertools
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import ebbtide.runtime
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.coordinator.__main__ import serve as serve_coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.rollout_worker.service import serve as serve_worker
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import ProcessSettings, Shutdown
from ebbtide.store.scripts import LEADER
from ebbtide.types.fleet import WorkerKind
from ebbtide.weight_relay.__main__ import serve as serve_relay
from ebbtide.weight_relay.settings import RelaySettings
from tests.fakes.scripted_settings import ENGINE, write_script
from tests.simulation.acks import Acks
from tests.simulation.grants import borrower
from tests.simulation.loop import Proc, SimLoop, current
from tests.simulation.monitor import Monitor
from tests.simulation.network import Network, Wire
from tests.simulation.patches import patched
from tests.simulation.plan import Plan
from tests.simulation.promises import Promises
from tests.simulation.store import Server, connect
from tests.simulation.trainer import COORDINATOR, RELAY, STANDBY, TOKEN, Journal, Outlook, Trainer

Main = Callable[[Shutdown], Coroutine[Any, Any, None]]
#: What a store that syncs every second may lose at most; `ebbtide.store` reckons with more.
_UNSYNCED_S: Final = 1.5
#: The coordinators, by where they listen.
_HEADS: Final = {COORDINATOR: "coordinator", STANDBY: "standby"}
_STORE: Final = "redis://127.0.0.1:6379/0"


class World:
    """`proc[name]` is the latest process of that name: redis, coordinator, standby, relay, trainer0..., w0, w1..."""

    def __init__(self, seed: int, *, trace: bool = False, record: Path | None = None) -> None:
        """`record`: a folder for the decisions of each coordinator."""
        self._record, self._started = record, itertools.count()
        self.loop = SimLoop(seed)
        self.plan = Plan(seed)
        self.outlook = Outlook()
        self.journals = {f"trainer{run.number}": Journal(run) for run in self.plan.runs}  # by trainer
        self.digest = 0
        self.trace: list[str] | None = [] if trace else None
        self.network = Network(self.loop, self._frame)
        self.monitor = Monitor(self.loop, self.journals.values())
        self.store = Server(self.loop, self.network, self.monitor.before, self._command)
        self.monitor.store = self.store
        if self.plan.forgetful:
            self.store.config[b"appendfsync"] = b"everysec"
        self.acks = Acks(self.monitor)
        self.proc: dict[str, Proc] = {}
        self._leader = "coordinator"
        self.promises = Promises(self.loop, self.network, self.monitor, self.plan, self.proc, lambda: self.leader)
        self.acks.on_beat = lambda proc, beat: self.promises.beats(proc, held=beat.held and not _reclaimed(beat))
        self.exits: list[tuple[str, int]] = []
        self.restart_s: Callable[[str], float] = lambda _name: self.loop.random.uniform(0.2, 3.0)
        self.directory = Path(tempfile.mkdtemp(prefix="ebb-sim-", dir="/dev/shm"))
        self.loop.connect = lambda factory, _host, port: connect(self.loop, self.network, factory, port)
        self.taps: list[Callable[[Proc, Wire, str, str, bytes], None]] = []
        self.ears: list[Callable[[Proc, int], None]] = []  # told of requests that begin (0) and of tokens (version)
        self.calm_at = 0.0  # when the last fault was over
        self.reclaims = 0
        self.interruptions = 0  # kills, stops and cuts that may have cost a worker its attempts

    def patched(self) -> AbstractContextManager[None]:
        borrow = borrower(self.loop, self.plan.seed, self._reclaimed)
        return patched(self.loop, self.network, self._told, self._log, self._ended, borrow)

    # -- what happens --------------------------------------------------------------------------------------------

    def note(self, kind: str, text: str) -> None:
        """Part of the history: two runs of a seed are the same if their digests are."""
        line = f"{self.loop.now:10.4f} {self.loop.steps:7d} {kind:9s} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self.trace is not None:
            self.trace.append(line)

    def _frame(self, wire: Wire, end: int, method: str, number: int, frame: tuple[Any, ...]) -> None:
        source, target = wire.procs[end], wire.procs[1 - end]
        kind, data = frame[0], frame[1] if frame[0] == "message" else b""
        text = f"{len(data)} bytes {zlib.crc32(data):08x}" if data else f"{frame[1:] if kind == 'status' else ''}"
        self.note("frame", f"{source.name}>{target.name} {method[14:]} {kind} {text}")
        if data and end == 1 and source.name in _HEADS.values():
            self.monitor.leadership.answers(source, method, data)
        for tap in self.taps:
            tap(source, wire, method, kind, data)
        if data and method.endswith(("/Append", "/Control")):
            self.acks.message(
                (wire.procs[0], number), data, method=method, up=end == 0, current=source is self.proc[self.leader]
            )

    def _command(self, command: list[bytes], reply: Any) -> None:
        self.note("store", f"{len(self.store.log)} {b' '.join(command[:1] + command[3:4])[:40]!r} {_short(reply)}")
        self.monitor.seen(command, reply)

    def _told(self, proc: Proc, attempt_id: str, version: int, mark: float) -> None:
        self.monitor.token(proc, attempt_id, version, mark)
        for ear in self.ears:
            ear(proc, version)

    def _reclaimed(self, seconds: float) -> None:
        """The host of a borrowed worker takes itself back: its rollouts may go elsewhere for that."""
        self.note("reclaim", f"{current.get()} {seconds:.3f}")
        self.interruptions += seconds > 1.0
        self.reclaims += 1

    def _log(self, level: str, event: str, values: dict[str, Any]) -> None:
        self.note("log", f"{level} {event} {values}")
        if event == "unexpected error" or (event == "failed" and "exc_info" in values):
            self.monitor.fail(f"{event}: {values}")

    # -- processes -----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.start("redis")
        self.start("coordinator")
        if self.plan.standby:
            self.start("standby")
        self.start("relay")
        for number in range(self.plan.workers):
            self.start(f"w{number}")
        for run in self.plan.runs:
            if run.begins_s:
                self.loop.outside.after(run.begins_s, self.start, f"trainer{run.number}")
            else:
                self.start(f"trainer{run.number}")
        self.loop.outside.spawn(self.promises.watch(), "promises")

    @property
    def leader(self) -> str:
        """The coordinator that holds the lease, or held it last."""
        item = self.store.data.get(LEADER.encode())
        if item is not None:
            self._leader = _HEADS[item.value.decode().partition(" ")[2]]
        return self._leader

    @property
    def live(self) -> list[str]:
        """The runs that have not come to an end."""
        return [journal.plan.run_id for journal in self.journals.values() if journal.ended is None]

    @property
    def trainers(self) -> list[str]:
        return [name for name in self.proc if name in self.journals]

    @property
    def workers(self) -> list[str]:
        return [name for name in self.proc if name[0] == "w"]

    def start(self, name: str, *, beside: bool = False) -> None:
        """A new process of that name, unless one is alive; with `beside` even then, as a failover does."""
        if not beside and (old := self.proc.get(name)) and old.alive:
            return
        former = self.proc.get(name)
        proc = self.proc[name] = Proc(name, self.loop)
        proc.former = former
        self.note("start", name)
        if name == "redis":
            self.store.start(proc)
        elif name in self.journals:
            proc.spawn(self._trainer(proc), name).add_done_callback(lambda task: self._trainer_ended(proc, task))
        else:
            main, settings = self._service(name)
            work = ebbtide.runtime._supervise(main, name, settings)
            proc.spawn(work, name).add_done_callback(lambda task: self._ended(proc, task.result()))

    def _service(self, name: str) -> tuple[Main, ProcessSettings]:
        if name in _HEADS.values():
            listen = next(address for address, head in _HEADS.items() if head == name)
            coordinator = CoordinatorSettings(
                server=ServerSettings(listen=listen, token=TOKEN),
                standby=self.plan.standby,
                store_url=_STORE,
                lease_ttl_s=6.0,
                reattach_grace_s=self.plan.reattach_grace_s,
                record_decisions=str(self._record / f"{name}.{next(self._started)}") if self._record else "",
            )
            return lambda shutdown: serve_coordinator(coordinator, shutdown), coordinator
        if name == "relay":
            relay = RelaySettings(
                server=ServerSettings(listen=RELAY, token=TOKEN), data_dir=str(self.directory / "relay")
            )
            return lambda shutdown: serve_relay(relay, shutdown), relay
        plan = self.plan
        worker = WorkerSettings(
            coordinator=",".join(_HEADS) if plan.standby else COORDINATOR,
            relay=RELAY,
            client=ClientSecurity(token=TOKEN),
            worker_id=name,
            kind=WorkerKind.BORROWED if int(name[1:]) < plan.borrowed else WorkerKind.RESERVED,
            engine=ENGINE,
            engine_options=write_script(plan.script),
            slots=plan.slots,
            flush_tokens=plan.flush_tokens,
            flush_interval_ms=plan.flush_interval_ms,
            pull_patience_s=20.0,
            mirror_dir="",
        )
        return lambda shutdown: serve_worker(shutdown, worker), worker

    async def _trainer(self, proc: Proc) -> None:
        await Trainer(self.plan, self.journals[proc.name], self.outlook, lambda text: self.note(proc.name, text)).run()

    def _trainer_ended(self, proc: Proc, task: Any) -> None:
        error = None if task.cancelled() else task.exception()
        self.note("exit", f"{proc} {error!r}")
        self._gone(proc)
        if self.journals[proc.name].ended is None:
            self.loop.outside.after(self.restart_s(proc.name), self.start, proc.name)

    def _ended(self, proc: Proc, code: int) -> None:
        self.note("exit", f"{proc} {code}")
        self.exits.append((proc.name, code))
        self._gone(proc)
        self.loop.outside.after(self.restart_s(proc.name), self.start, proc.name)

    def _gone(self, proc: Proc) -> None:
        self.interruptions += 1
        proc.kill()
        self.network.killed(proc)

    def kill(self, name: str) -> None:
        """SIGKILL; something starts it again."""
        proc = self.proc[name]
        if proc.alive:
            self.note("kill", name)
            self.promises.leaves(proc, killed=True)
            self._gone(proc)
            if name == "redis" and self.plan.forgetful:
                self._forget()
            self.loop.outside.after(self.restart_s(name), self.start, name)

    def end(self, proc: Proc) -> None:
        """SIGKILL to a process that another has taken the place of."""
        if proc.alive:
            self.note("kill", f"the former {proc}")
            self._gone(proc)

    def _forget(self) -> None:
        """The store's newest second or so was not on its disk yet."""
        since = self.loop.now - self.loop.random.uniform(0.0, _UNSYNCED_S)
        self.note("forget", f"what came after {since:.4f}")
        self.monitor.learn_versions()
        self.store.lose_tail(since)
        self.monitor.forgot()

    def terminate(self, name: str) -> None:
        """SIGTERM."""
        proc = self.proc[name]
        if proc.alive and signal.SIGTERM in proc.signals:
            self.note("sigterm", name)
            self.promises.leaves(proc, killed=False)
            proc.after(0.0, proc.signals[signal.SIGTERM])

    def close(self) -> None:
        self.loop.bury()
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _short(reply: Any) -> str:
    """The beginning of a reply of the store."""
    if isinstance(reply, list):
        return f"{len(reply)} of {_short(reply[0])}" if reply else "[]"
    return repr(reply[:60] if isinstance(reply, bytes) else reply)[:60]


def _reclaimed(beat: Any) -> bool:
    """Whether the worker says that its host has itself back."""
    return bool(beat.HasField("borrowed") and not beat.borrowed.granted)
