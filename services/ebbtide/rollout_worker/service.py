"""Runs a worker: boots the engine, stays attached, and hands all attempts over at the end."""

import asyncio
import importlib
import os
import random
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.grants import Page, check_folder, page_path, socket_path
from ebbtide.ledger import Ledger
from ebbtide.rollout_worker.boot_loan import BootLoan
from ebbtide.rollout_worker.control_handler import ControlHandler, ControlOutbox, throttle
from ebbtide.rollout_worker.device_lease import DeviceLease
from ebbtide.rollout_worker.engine import Engine
from ebbtide.rollout_worker.engine.changing_engine import ChangingEngine
from ebbtide.rollout_worker.engine.checkpoint_facts import check_directory
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.rollout_worker.generation.outbox import JITTER, Outbox
from ebbtide.rollout_worker.guard_link import GuardLink, WeightSleep
from ebbtide.rollout_worker.installs.installer import Installer, InstallReports
from ebbtide.rollout_worker.installs.peers import check_reachable
from ebbtide.rollout_worker.installs.weight_store import WeightStore
from ebbtide.rollout_worker.settings import CPU_SLOTS, GPU_SLOTS, WorkerSettings
from ebbtide.rollout_worker.streams import ControlSession
from ebbtide.rpc.channel import check_address, open_channel, open_socket
from ebbtide.rpc.leader_channel import LeaderChannel, addresses
from ebbtide.runtime import Shutdown, race
from ebbtide.transfer import check_folder as check_mirrors
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.types.fleet import EngineInfo, WorkerKind
from ebbtide.types.ids import check_id
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.v1.weights_pb2_grpc import WeightsStub

log = telemetry.get_logger(__name__)

#: Time for the coordinator to close the streams after the hand-over,
_GOODBYE_S: Final = 5.0
#: but no more than this after its deadline.
_LAST_S: Final = 0.5
#: Time to hand over after a failure: the process ends ten seconds after it in any case (`runtime`).
_FAILED_S: Final = 8.0
#: Niceness of threads beside a served engine: they get what it leaves of the cores.
_NICENESS: Final = 19

#: Makes an engine that is not started yet. `Path`: the checkpoint that it restarts with; None: the worker's own.
#: `Page`: of grants, for a borrowed engine, which computes only as they allow.
EngineFactory = Callable[[WorkerSettings, Path | None, Page | None], Engine]


def make_engine(settings: WorkerSettings, borrowed: BorrowedEngine | None = None) -> Engine:
    """The engine that the settings name. Raises `InvalidRequest` for one that cannot be had, or cannot boot."""
    if borrowed is None and settings.change_architecture:
        return ChangingEngine(lambda model: _engine(settings, model), settings.change_max_mib << 20)
    return _engine(settings, None, borrowed)


def _engine(settings: WorkerSettings, model: Path | None, borrowed: BorrowedEngine | None = None) -> Engine:
    """An engine for the checkpoint directory `model`, or for the worker's own."""
    if settings.engine != "vllm":
        return _factory(settings.engine)(settings, model, borrowed.page if borrowed else None)
    if settings.engine_options:
        raise InvalidRequest("is for an engine of your own; vLLM takes vllm.engine_args", field="engine_options")
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine

    return VllmEngine(str(model or settings.model), settings.slots, settings.vllm, borrowed)


def _factory(path: str) -> EngineFactory:
    """Imports the factory of an engine that is not Ebbtide's own. Raises `InvalidRequest` naming the field."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise InvalidRequest(f"{path!r} is no engine; give vllm, or package.module:factory", field="engine")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        text = f"{path} cannot be imported ({error}); install its package, or add its folder to PYTHONPATH"
        raise InvalidRequest(text, field="engine") from error
    return factory


def _borrowed(settings: WorkerSettings, worker_id: str) -> BorrowedEngine | None:
    """The grants of a borrowed worker's engine. Raises `InvalidRequest` for a kind and a folder that do not match."""
    if settings.kind is not WorkerKind.BORROWED:
        if settings.grant_dir:
            raise InvalidRequest("is for workers of kind borrowed: set that kind, or leave it out", field="grant_dir")
        return None
    if not settings.grant_dir:
        text = "a borrowed worker needs one: name the folder that the serving-guard of its host was given"
        raise InvalidRequest(text, field="grant_dir")
    check_folder(folder := Path(settings.grant_dir).absolute())
    return BorrowedEngine(page_path(folder, worker_id), settings.step_tokens)


async def serve(shutdown: Shutdown, settings: WorkerSettings, *, booted: Callable[[], None] | None = None) -> None:
    """Run one worker until it has left. `booted` is called when its engine is up. Raises the failure that ends it."""
    settings = with_slots(settings)
    worker_id = check_id(settings.worker_id or f"{socket.gethostname()}-{os.getpid()}", field="worker_id")
    telemetry.bind(worker_id=worker_id)
    check_reachable(settings)
    addresses(settings.coordinator)  # reports wrong settings early: an engine may take a minute to start
    check_address(settings.relay, field="relay")
    if settings.mirror_dir:
        check_mirrors(Path(settings.mirror_dir))
    borrowed = _borrowed(settings, worker_id)
    engine = make_engine(settings, borrowed)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        announced = None
        if borrowed and settings.engine == "vllm" and borrowed.sleeps:
            _prepare(engine)  # the announcement already asks vLLM for the device
            announced = await _announced(stack, shutdown, settings, worker_id, borrowed)
            if announced is None:
                return
            info = await engine.start(aside=True)
        else:
            # The engine starts first: it may fork its processes, which is safe only without other threads.
            info = await engine.start()
        if booted is not None:
            booted()
        log.info("engine ready", model=info.model, max_model_len=info.max_model_len)
        coordinator = await stack.enter_async_context(LeaderChannel(settings.coordinator, settings.client))
        worker, store = await _assemble(stack, shutdown, settings, worker_id, engine, info, borrowed)
        if announced is not None:
            loan, announcing = announced
            await loan.succeeded()  # by the stream of the link, so that the guard knows of the engine all the time
            await _end(announcing)
        telling = shutdown.spawn(store.tell_relay(), "presence")
        stack.push_async_callback(_end, telling)  # before the channel to the relay closes
        await stack.enter_async_context(store.listener.serving(worker.leaving))
        session = ControlSession(worker, coordinator, attached=_once(shutdown, worker_id))
        installing = shutdown.spawn(worker.installer.run(), "installer")
        stack.push_async_callback(_end, installing)  # before the engine stops
        store.warm_up()
        shutdown.spawn(throttle(engine, worker.outbox, worker.attempts), "throttle")
        streams = shutdown.spawn(session.run(), "streams")
        shutdown.spawn(_on_signal(shutdown, worker), "signals")
        if settings.notices != "none":
            from ebbtide.rollout_worker.notices import watch

            # Begins when the engine is up: earlier notices can still be read then.
            shutdown.spawn(watch(settings.notices, settings.metadata_url, worker.leave), "notices")
        await worker.leaving.wait()
        await _leave(worker, session, streams)


def with_slots(settings: WorkerSettings) -> WorkerSettings:
    """The settings with a number of slots. Raises `InvalidRequest` if vLLM is to be the engine and is not there."""
    if settings.slots:
        return settings
    on_gpu = settings.engine == "vllm" and not is_cpu_build()
    return replace(settings, slots=GPU_SLOTS if on_gpu else CPU_SLOTS)


def _prepare(engine: Engine) -> None:
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine

    if isinstance(engine, VllmEngine):
        engine.set_environment()


async def _announced(
    stack: AsyncExitStack, shutdown: Shutdown, settings: WorkerSettings, worker_id: str, borrowed: BorrowedEngine
) -> tuple[BootLoan, asyncio.Task[None]] | None:
    """Wait until the borrowed engine may boot. Returns what goes on telling the guard of it; None: the process is to
    end. Raises `InvalidRequest` for an engine whose needs are not known."""
    borrowed.learn(check_directory(settings.model), settings.vllm)
    target = socket_path(borrowed.path.parent)
    stub = GrantsStub(await stack.enter_async_context(open_socket(target)))
    loan = BootLoan(stub, str(target), borrowed, worker_id=worker_id)
    announcing = shutdown.spawn(loan.run(), "announcement")
    stack.push_async_callback(_end, announcing)
    return None if await race(loan.permission(), shutdown.requested.wait()) else (loan, announcing)


async def _assemble(
    stack: AsyncExitStack,
    shutdown: Shutdown,
    settings: WorkerSettings,
    worker_id: str,
    engine: Engine,
    info: EngineInfo,
    borrowed: BorrowedEngine | None,
) -> tuple[ControlHandler, WeightStore]:
    """Make the parts around a booted engine. Only the tasks of the link to the host's guard begin here."""
    outgoing, outbox = ControlOutbox(), _outbox(settings)
    ledger = stack.enter_context(Ledger(Path(settings.counter_file))) if settings.counter_file else None
    attempts = LocalAttempts(
        engine,
        info,
        outbox,
        ledger,
        release=outgoing.release,
        fail=shutdown.fail,
        slots=settings.slots,
        by_memory=settings.admit_by_memory,
        stream_interval=settings.stream_interval,
    )
    stack.push_async_callback(attempts.close)
    relay = await stack.enter_async_context(open_channel(settings.relay, settings.client))
    store = WeightStore(
        settings,
        worker_id,
        engine,
        WeightsStub(relay),
        in_place=_in_place(settings),
        threads=threads_for(settings),
    )
    stack.callback(store.close)
    lease = DeviceLease(borrowed.page) if borrowed else None
    changing = engine if isinstance(engine, ChangingEngine) else None
    installer = Installer(engine, store, attempts, InstallReports(outgoing.put), lease, changing)
    sleeping = _sleeping(engine, installer) if borrowed else None
    link = None
    if borrowed and lease:
        link = await _borrow(stack, shutdown, settings, worker_id, borrowed, lease, attempts, sleeping)
    return ControlHandler(settings, worker_id, outbox, attempts, installer, outgoing, link), store


def _in_place(settings: WorkerSettings) -> bool:
    """Whether the engine applies changes to weights where they are. CPU builds load packed copies of them."""
    return settings.engine == "vllm" and not is_cpu_build()


def threads_for(settings: WorkerSettings) -> DigestThreads:
    """For digests and patches. A borrowed worker's have the lowest priority, because a pull waits for no grant; one at
    most where the served engine computes on the same cores."""
    if settings.kind is not WorkerKind.BORROWED:
        return DigestThreads()
    on_cores = settings.engine == "vllm" and is_cpu_build()
    return DigestThreads(1, niceness=_NICENESS) if on_cores else DigestThreads(niceness=_NICENESS)


async def _borrow(
    stack: AsyncExitStack,
    shutdown: Shutdown,
    settings: WorkerSettings,
    worker_id: str,
    borrowed: BorrowedEngine,
    lease: DeviceLease,
    attempts: LocalAttempts,
    sleeping: WeightSleep | None,
) -> GuardLink:
    """Begin to borrow from the guard of the host, which need not be there yet."""
    target = socket_path(borrowed.path.parent)
    stub = GrantsStub(await stack.enter_async_context(open_socket(target)))
    stack.callback(borrowed.close)
    link = GuardLink(stub, str(target), borrowed, lease, attempts, sleeping, worker_id=worker_id, slots=settings.slots)
    for work in (link.run(), link.watch(), link.move()):
        stack.push_async_callback(_end, shutdown.spawn(work, "grants"))
    return link


def _sleeping(engine: Engine, installer: Installer) -> WeightSleep | None:
    """Moves the weights of an engine that has some; None for others."""
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine

    return WeightSleep(engine, installer) if isinstance(engine, VllmEngine) else None


async def _on_signal(shutdown: Shutdown, worker: ControlHandler) -> None:
    """Leave after a signal or a failure. The process ends by itself some seconds after a failure."""
    await shutdown.requested.wait()
    failure = shutdown.failure
    patience_s = worker.settings.drain_timeout_s
    worker.leave(min(patience_s, _FAILED_S) if failure else patience_s, "failed" if failure else "signal")


def _outbox(settings: WorkerSettings) -> Outbox:
    drafts = settings.engine == "vllm" and settings.vllm.speculation != "off"
    return Outbox(
        flush_tokens=settings.flush_tokens,
        flush_interval_s=settings.flush_interval_ms / 1000,
        step_tokens=1 + settings.vllm.speculation_tokens if drafts else 1,
        stream_interval=settings.stream_interval,
        jitter=lambda: random.uniform(*JITTER),
    )


def _once(shutdown: Shutdown, address: str) -> Callable[[], None]:
    """Calls `shutdown.ready` at the first call alone."""
    return cache(lambda: shutdown.ready(address))


async def _leave(worker: ControlHandler, session: ControlSession, streams: asyncio.Task[None]) -> None:
    drain = asyncio.create_task(worker.drain())
    try:
        await asyncio.wait({drain, streams}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            raise Unavailable("the streams to the coordinator had ended: nothing could be handed over")
        if not drain.result():
            raise Unavailable("not all tokens could be handed over in time; other workers generate them again")
    finally:
        await _end(drain)
    if session.connected:
        await asyncio.wait({streams}, timeout=min(_GOODBYE_S, worker.remaining_s + _LAST_S))
    log.info("drained", reason=worker.reason, tokens=worker.attempts.tokens)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
