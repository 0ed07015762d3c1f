"""Finds the run that a request belongs to, and keeps open what serving it takes: a lease, and the model's text side.

Invariant: a run has at most one open lease here, which one task opens while others wait for it. Leases that are lost
are opened again by the next request; those of runs that nobody asks of are released, and a request that waits asks.
No request is told that its run is unknown by a list that is older than the request. A model folder is loaded once, by
one thread, and stays loaded. Nothing here outlives the process: leases expire by themselves.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ebbtide.client import Client
from ebbtide.client.lease import GatewayLease
from ebbtide.errors import EbbtideError, InvalidRequest, LeaseSuperseded, NotFound
from ebbtide.gateway.access import ClientKey
from ebbtide.gateway.model import ServedModel, context_of, read_model_config
from ebbtide.gateway.parsers import ParserNames
from ebbtide.gateway.prompt_threads import PromptThreads
from ebbtide.gateway.request_player import RequestPlayer
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.hub_models import cached_model, model_folder, model_place
from ebbtide.telemetry import get_logger
from ebbtide.types.run import Run

#: Model folders to keep loaded, 10 to 100 MB each.
_MOST_MODELS: Final = 64


class RunCatalog:
    """All runs of a cluster."""

    def __init__(
        self,
        client: Client,
        sandbox: TemplateSandbox,
        parsers: ParserNames,
        *,
        holder: str,
        model_roots: Sequence[str],
        max_model_len: int,
        bound_run: Callable[[], str] = str,
    ) -> None:
        """`holder`: names this gateway among those of a run. `max_model_len` 0: each model's own. `bound_run`: the only
        run that the gateway's own token is for; "": all runs.
        """
        self._client, self._sandbox, self._parsers = client, sandbox, parsers
        self._holder, self._max_model_len = holder, max_model_len
        self._roots = [Path(root).resolve() for root in model_roots]
        self._models: dict[tuple[str, int], asyncio.Task[ServedModel]] = {}  # by folder and context
        self._bound_run = bound_run

    async def runs(self) -> list[Run]:
        """All runs; under a token of one run, this one."""
        if not (run_id := self._bound_run()):
            return await self._client.runs()
        try:
            return [await self._client.run(run_id)]
        except NotFound:
            return []

    async def open(self, run: Run) -> GatewayLease:
        """Claim a lease. Raises `NotFound` or `NotReady` for a run that takes no requests."""
        try:
            return await self._client.acquire_gateway(run.run_id, holder=self._holder)
        except LeaseSuperseded:
            raise NotFound(f"model: run {run.run_id} has ended") from None

    async def context(self, run: Run) -> int:
        """Most tokens of prompt and response of the run's model; 0 if its folder is not here."""
        try:
            folder = await asyncio.to_thread(self._folder, run, fetch=False)
            return context_of(await asyncio.to_thread(read_model_config, folder), self._most(run))
        except InvalidRequest:
            return 0

    async def model(self, run: Run) -> ServedModel:
        """The text side of the run's model. Raises `InvalidRequest` naming `model` if it cannot be loaded here."""
        name = (run.spec.model, run.spec.max_model_len)
        task = self._models.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            while len(self._models) >= _MOST_MODELS:
                self._models.pop(next(iter(self._models)))
            task = self._models[name] = asyncio.create_task(self._load(run))
        return await asyncio.shield(task)

    async def _load(self, run: Run) -> ServedModel:
        folder = await asyncio.to_thread(self._folder, run)
        return await asyncio.to_thread(
            ServedModel.load, folder, self._sandbox, self._parsers, max_model_len=self._most(run)
        )

    def _most(self, run: Run) -> int:
        """Prompt plus response, in tokens, that the gateway's and the run's settings allow; 0: neither says it."""
        return min(filter(None, (self._max_model_len, run.spec.max_model_len)), default=0)

    def _folder(self, run: Run, *, fetch: bool = True) -> Path:
        """The model's folder, where links lead. Raises `InvalidRequest` naming `model` outside of the allowed roots,
        and for a model that would have to be fetched where it is not to be."""
        self._check_root(run, model_place(run.spec.model))  # before anything is fetched
        folder = model_folder(run.spec.model) if fetch else cached_model(run.spec.model)
        if folder is None:
            raise InvalidRequest(f"{run.spec.model!r} is not in this machine's cache", field="model")
        return self._check_root(run, folder)

    def _check_root(self, run: Run, place: Path) -> Path:
        try:
            folder = place.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a zero byte
            raise InvalidRequest(f"{run.spec.model!r} is no folder: {error}", field="model") from error
        if not any(folder.is_relative_to(root) for root in self._roots):
            roots = ", ".join(map(str, self._roots)) or "any folder"
            raise InvalidRequest(
                f"the run's model {str(folder)!r} is not below {roots}; have its folder added to model_roots "
                "(EBBTIDE_MODEL_ROOTS) of the gateway",
                field="model",
            )
        return folder


log = get_logger(__name__)
#: Between two reads for clients, of the list or for names that are not in it: they do not load the coordinator.
_UNKNOWN_S: Final = 0.5


class ServedRun:
    """An open run."""

    def __init__(self, lease: GatewayLease, player: RequestPlayer, clock: Callable[[], float]) -> None:
        self.lease, self.player, self._clock = lease, player, clock
        self._users = 0
        self._used_at = clock()

    @property
    def run(self) -> Run:
        return self.lease.run

    @property
    def idle_s(self) -> float:
        """Seconds since the run was used last; 0 while it is in use."""
        return 0.0 if self._users else self._clock() - self._used_at

    def touch(self) -> None:
        """Begin the idle time again."""
        self._used_at = self._clock()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the run open inside the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.touch()


class RunDirectory:
    """The runs that this gateway serves."""

    def __init__(
        self,
        catalog: RunCatalog,
        *,
        threads: PromptThreads | None = None,
        max_prompt_tokens: int = 0,
        idle_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: encode the prompts of all runs. `idle_s`: after so long without a request a run's lease is
        released.
        """
        self._catalog, self._clock, self._idle_s = catalog, clock, idle_s
        self._threads, self._max_prompt_tokens = threads or PromptThreads(), max_prompt_tokens
        self._runs: list[Run] = []
        self._read_at: float | None = None  # when the read that they are from began
        self._reading: asyncio.Task[None] | None = None  # for clients: those who wait share it, and its failure
        self._served: dict[str, ServedRun] = {}
        self._opening: dict[str, asyncio.Task[ServedRun]] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator has told of its runs."""
        return self._read_at is not None

    async def refresh(self) -> None:
        """Read the runs again, and release leases that are not needed."""
        began, runs = self._clock(), await self._catalog.runs()
        if self._read_at is None or began >= self._read_at:  # else a read that began later has ended before
            self._runs, self._read_at = runs, began
        self._release_idle()

    async def context(self, run: Run) -> int:
        """Most tokens of prompt and response of a run's model; 0 if its folder is not here."""
        return await self._catalog.context(run)

    async def visible(self, key: ClientKey) -> list[Run]:
        """The live runs that a key is for, oldest first: those that were submitted before it asks are among them."""
        await self._read_since(self._clock())
        return [run for run in self._live() if key.admits(run.run_id)]

    async def find(self, key: ClientKey, model: str) -> ServedRun:
        """The run of a request. A key of one run decides alone; else `model` is the run's id, or its name.

        Raises `NotFound` and `InvalidRequest` naming `model`.
        """
        if (run := self._named(key, model)) is None:
            await self._read_since(self._clock())
            run = self._named(key, model)
        if run is None:
            raise NotFound(_unknown(key, model))
        return await self._open(run)

    async def close(self) -> None:
        begun = [*self._opening.values(), *([self._reading] if self._reading else [])]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        releases = [served.lease.release() for served in self._served.values()]
        await asyncio.gather(*releases, *self._releasing, return_exceptions=True)
        self._served.clear()

    def _live(self) -> list[Run]:
        return [run for run in self._runs if not run.status.ended]

    def _named(self, key: ClientKey, model: str) -> Run | None:
        live = self._live()
        if key.run_id:
            return next((run for run in live if run.run_id == key.run_id), None)
        if found := next((run for run in live if run.run_id == model), None):
            return found
        named = [run for run in live if run.spec.name == model] if model else live
        if len(named) > 1:
            raise InvalidRequest(
                f"{len(named)} live runs {f'are named {model[:100]}' if model else 'are there'}; give a run's id",
                field="model",
            )
        return named[0] if named else None

    async def _read_since(self, asked_at: float) -> None:
        """Return when the runs are from a read that began at `asked_at` or later."""
        while self._read_at is None or self._read_at < asked_at:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_again())
                self._reading.add_done_callback(self._has_read)
            await asyncio.shield(self._reading)

    async def _read_again(self) -> None:
        if self._read_at is not None:
            await asyncio.sleep(self._read_at + _UNKNOWN_S - self._clock())
        await self.refresh()

    def _has_read(self, task: "asyncio.Task[None]") -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()  # those who wait raise it; perhaps all of them have left

    async def _open(self, run: Run) -> ServedRun:
        served = self._served.get(run.run_id)
        if served is None or served.lease.lost.is_set():
            if (task := self._opening.get(run.run_id)) is None:
                task = self._opening[run.run_id] = asyncio.create_task(self._make(run))
                task.add_done_callback(lambda done: self._opened(run.run_id, done))
            served = await asyncio.shield(task)
        served.touch()
        return served

    def _opened(self, run_id: str, task: "asyncio.Task[ServedRun]") -> None:
        self._opening.pop(run_id, None)
        if not task.cancelled():
            task.exception()  # those who wait raise it; perhaps all of them have left

    async def _make(self, run: Run) -> ServedRun:
        model = await self._catalog.model(run)
        lease = await self._catalog.open(run)
        player = RequestPlayer(lease, model, threads=self._threads, max_prompt_tokens=self._max_prompt_tokens)
        served = self._served[run.run_id] = ServedRun(lease, player, self._clock)
        log.info("serves a run", run_id=run.run_id)
        return served

    def _release_idle(self) -> None:
        """Begin to release leases that are not needed: it may take seconds, in which nobody who asks waits."""
        live = {run.run_id for run in self._live()}
        for run_id, served in list(self._served.items()):
            if served.lease.lost.is_set() or run_id not in live or served.idle_s > self._idle_s:
                del self._served[run_id]
                task = asyncio.create_task(_release(served))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)


async def _release(served: ServedRun) -> None:
    try:
        await served.lease.release()
    except EbbtideError as error:
        log.info("a lease was not released; it expires", run_id=served.run.run_id, reason=str(error))


def _unknown(key: ClientKey, model: str) -> str:
    if key.run_id:
        return f"model: the key's run {key.run_id} is not there, or has ended"
    return f"model: no live run has the id or name {model[:100]!r}; GET /v1/models lists them"
