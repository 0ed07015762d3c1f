"""Reaches runs through the SDK, and loads their models from this machine.

Invariant: a model folder is loaded once, by one thread, while others wait for it. Models that were loaded stay until
the process ends; a restart loads them again.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ebbtide.client import Client
from ebbtide.client.gateway_lease import GatewayLease
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NotFound
from ebbtide.gateway.model import ServedModel, context_of, read_model_config
from ebbtide.gateway.parsers import ParserNames
from ebbtide.gateway.templates import TemplateSandbox
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
            folder = await asyncio.to_thread(self._folder, run)
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
