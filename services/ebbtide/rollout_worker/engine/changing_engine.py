"""Restarts the engine for another model, while the worker goes on.

Invariant: `_inner` is the only engine, possibly starting or stopping; during `change` it has no request, and none is
admitted. Reasons to pause hold across a change. If a model cannot be started, the worker's own model is started again,
without a version. Engines' processes die with the thread that starts them, so a thread that lasts as long as this
process starts all but the first.
"""

import re
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Boxes, Engine, EngineFailed, EngineRequest, Shapes, TokenDelta
from ebbtide.types.fleet import DraftingState, EngineInfo
from ebbtide.types.ids import shortened
from ebbtide.types.weights import Manifest
from ebbtide.weights import check_config

log = telemetry.get_logger(__name__)

#: Model names that may name a folder.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class EngineNotChanged(InvalidRequest):
    """No engine could be started for a model."""

    def __init__(self, message: str, info: EngineInfo) -> None:
        super().__init__(message, field="config")
        self.info = info  # of the worker's own model, which runs again


class ChangingEngine:
    """Implements `Engine`; see there."""

    def __init__(self, make: Callable[[Path | None], Engine], most_bytes: int) -> None:
        """`make` returns an engine before its start, for a checkpoint directory or (None) for the worker's own model.
        `most_bytes`: limit of the weights that an engine may be started for; 0: none."""
        self._make, self._most = make, most_bytes
        self._inner = make(None)
        self._paused: set[str] = set()
        self._between = False  # whether there is no engine now
        self.restart_s = 0.0  # duration of the last start
        self._preemptions = 0  # of former engines

    async def start(self, *, aside: bool = False) -> EngineInfo:
        began = time.monotonic()
        info = await self._inner.start(aside=aside)
        self.restart_s = time.monotonic() - began
        return info

    def refusal(self, manifest: Manifest) -> str:
        """Why no engine can be started for this version; empty if one may be."""
        if not manifest.config:
            return "its versions carry no config.json to start an engine from"
        if not manifest.config_signature:
            return "its versions' config.json is not signed by the run's publisher"
        size = sum(entry.size for entry in manifest.tensors)
        if self._most and size > self._most:
            return f"its weights have {size} bytes, more than change_max_mib allows ({self._most})"
        return ""

    async def change(self, name: str, config: bytes, weights: Path) -> EngineInfo:
        """Restart for the model `config`, with the weights of a safetensors file. No request may be in the engine.

        Raises `EngineNotChanged` if the model does not start, and `EngineFailed` if the worker's own model does not
        start again either.
        """
        check_config(config)
        began, self._between = time.monotonic(), True
        with _checkpoint(name, config, weights) as root:
            self._preemptions += self._inner.preemptions
            await self._inner.stop()
            try:
                info = await self._start(self._make(root))
            except Exception as error:
                text = shortened(f"no engine starts for {name}: {error}")
                log.warning("back to the worker's own model", reason=text)
                raise EngineNotChanged(text, await self._go_back()) from error
        self.restart_s = time.monotonic() - began
        return info

    async def _start(self, engine: Engine) -> EngineInfo:
        self._inner = engine
        info = await engine.start(aside=True)
        for reason in list(self._paused):
            await engine.pause(reason)
        self._between = False
        return info

    async def _go_back(self) -> EngineInfo:
        try:
            await self._inner.stop()
            return await self._start(self._make(None))
        except Exception as error:
            raise EngineFailed(f"no engine starts any more, not even for the worker's own model: {error}") from error

    # -- `Engine`, by the current one ----------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        return self._inner.shapes

    @property
    def boxes(self) -> Boxes | None:
        return self._inner.boxes

    @property
    def scores_prompts(self) -> bool:
        return self._inner.scores_prompts

    @property
    def preemptions(self) -> int:
        return self._preemptions + (0 if self._between else self._inner.preemptions)

    @property
    def speculates(self) -> bool:
        return self._inner.speculates

    @property
    def drafting(self) -> DraftingState | None:
        return self._inner.drafting

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(self._inner.generate(request)) as stream:
            async for delta in stream:
                yield delta

    def deliver(self, request_id: str | None = None) -> None:
        if not self._between:
            self._inner.deliver(request_id)

    def forget(self, names: Sequence[str]) -> None:
        if not self._between:
            self._inner.forget(names)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode(token_ids)

    async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
        return await self._inner.install(version, weights, changes)

    async def pause(self, reason: str) -> None:
        self._paused.add(reason)
        if not self._between:
            await self._inner.pause(reason)

    async def resume(self, reason: str) -> None:
        self._paused.discard(reason)
        if not self._between:
            await self._inner.resume(reason)

    def check(self) -> None:
        self._inner.check()

    async def stop(self) -> None:
        await self._inner.stop()


@contextmanager
def _checkpoint(name: str, config: bytes, weights: Path) -> Iterator[Path]:
    """A temporary checkpoint directory, for an engine to read."""
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-model-"))
    try:
        root = folder / (name if _NAME.fullmatch(name) else "model")
        root.mkdir()
        (root / "config.json").write_bytes(config)
        (root / "model.safetensors").symlink_to(weights)
        yield root
    finally:
        shutil.rmtree(folder, ignore_errors=True)
