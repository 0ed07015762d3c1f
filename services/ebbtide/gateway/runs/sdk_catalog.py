"""Reaches runs through the SDK, and loads their models from this machine.

Invariant: a model folder is loaded once, by one thread, while others wait for it. Models that were loaded stay until
the process ends; a restart loads them again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Final

from ebbtide.client import Client
from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NoCapacity, NotFound, RateLimited
from ebbtide.gateway.runs.served_model import ServedModel, context_of, load_served_model, read_model_config
from ebbtide.gateway.text.output_parsers import ParserNames
from ebbtide.gateway.text.template_sandbox import TemplateSandbox
from ebbtide.types.key_usage import KeyUsage, MeteredKey
from ebbtide.types.rollout import RolloutRequest, TokenChunk
from ebbtide.types.run import Run
from ebbtide.types.session import Session, SessionEnd, SessionTurn, TurnPage

#: A request waits so long for room in the run's queue or quota; then its client is told, and may wait by itself.
_ROOM_S: Final = 10.0
#: Model folders to keep loaded, 10 to 100 MB each.
_MOST_MODELS: Final = 64


class LeaseSource:
    """A run under a gateway's lease."""

    def __init__(self, client: Client, lease: GatewayLease, *, room_s: float = _ROOM_S) -> None:
        """`room_s`: how long a submit waits for room."""
        self._client, self._lease, self._room_s = client, lease, room_s
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The newest that is known: the lease's renewals bring it along, too."""
        renewed = self._lease.run
        if self._run is not None and self._run.age_s > renewed.age_s:
            return self._run
        return renewed

    @property
    def is_lost(self) -> bool:
        return self._lease.lost.is_set()

    async def refreshed(self) -> Run:
        self._run = await self._client.run(self._lease.run_id)
        return self._run

    async def submit(self, rollouts: Sequence[RolloutRequest], key: MeteredKey | None = None) -> None:
        ends = time.monotonic() + self._room_s
        while True:
            try:
                await self._lease.submit_rollouts(rollouts, wait=False, key=key)
            except NoCapacity as error:
                if isinstance(error, RateLimited) or time.monotonic() + error.retry_after_s > ends:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                return

    def tokens(self, rollout_id: str) -> AsyncGenerator[TokenChunk, None]:
        return self._lease.tokens(rollout_id)

    async def cancel(self, rollout_ids: Sequence[str], reason: str = "") -> None:
        await self._lease.cancel_rollouts(rollout_ids, reason)

    async def key_usage(self, owner: str) -> KeyUsage:
        return await self._lease.key_usage(owner)

    async def open_session(self, session_id: str, owner: str, *, group_id: str = "", record: bytes = b"") -> Session:
        return await self._lease.open_session(session_id, owner, group_id=group_id, record=record)

    async def add_turn(
        self, session_id: str, owner: str, turn: SessionTurn, *, key: MeteredKey | None = None, tokens: int = 0
    ) -> SessionTurn:
        return await self._lease.add_turn(session_id, owner, turn, key=key, tokens=tokens)

    async def read_turns(self, session_id: str, owner: str, after: int = 0) -> TurnPage:
        return await self._lease.read_turns(session_id, owner, after)

    async def end_session(self, how: SessionEnd) -> Session:
        return await self._lease.end_session(how)

    async def sessions(self, owner: str) -> list[Session]:
        return await self._lease.sessions(owner)

    async def release(self) -> None:
        await self._lease.release()


class SdkCatalog:
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

    async def open(self, run: Run) -> LeaseSource:
        try:
            lease = await self._client.acquire_gateway(run.run_id, holder=self._holder)
        except LeaseSuperseded:
            raise NotFound(f"model: run {run.run_id} has ended") from None
        return LeaseSource(self._client, lease)

    async def context(self, run: Run) -> int:
        try:
            folder = await asyncio.to_thread(self._folder, run)
            return context_of(await asyncio.to_thread(read_model_config, folder), self._most(run))
        except InvalidRequest:
            return 0

    async def text_model(self, run: Run) -> ServedModel:
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
            load_served_model, folder, self._sandbox, self._parsers, max_model_len=self._most(run)
        )

    def _most(self, run: Run) -> int:
        """Prompt plus response, in tokens, that the gateway's and the run's settings allow; 0: neither says it."""
        return min(filter(None, (self._max_model_len, run.spec.max_model_len)), default=0)

    def _folder(self, run: Run) -> Path:
        """The model's folder, where links lead. Raises `InvalidRequest` naming `model` outside of the allowed roots."""
        try:
            folder = Path(run.spec.model).resolve()
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
