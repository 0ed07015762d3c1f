"""Brings versions into the processes of one vLLM engine: before generation stops, while it stands still, and after.

Invariant: an engine process has a version's files open only between `prepare` and `finish`; only `apply` writes.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import EngineFailed, Shapes
from ebbtide.rollout_worker.engine.vllm.weights import version_files
from ebbtide.rollout_worker.engine.vllm.weights.tensor_boxes import Boxes, together
from ebbtide.rollout_worker.engine.vllm.weights.version_files import InstallMethod

log = telemetry.get_logger(__name__)


class VersionUpdates:
    """Talks to `TileTransfer` in each engine process."""

    def __init__(
        self, llm: Any, shapes: Shapes, dtypes: dict[str, str], reports: Sequence[tuple[Boxes | None, str]]
    ) -> None:
        """`reports`: of each rank; see `TileTransfer.report`."""
        self._llm = llm
        self._shapes, self._dtypes = shapes, dtypes
        self._obstacles = [obstacle for _, obstacle in reports]
        self.boxes = together([None if boxes is None else _as_boxes(boxes) for boxes, _ in reports])

    @classmethod
    async def learned(cls, llm: Any, shapes: Shapes, dtypes: dict[str, str]) -> Self:
        """Let the processes learn what they read of a version. Raises `InvalidRequest` if none can be installed."""
        try:
            await llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
            return cls(llm, shapes, dtypes, await ask_ranks(llm, "report"))
        except Exception as error:
            raise InvalidRequest(f"cannot take new weights: {error}", field="model") from error

    async def prepare(self, version: int, weights: Path, changes: Path | None) -> InstallMethod:
        """Check and map the files, while generation goes on.

        Raises `InvalidRequest` with the files closed again, or `EngineFailed` if they may be open.
        """
        try:
            entries = await asyncio.to_thread(version_files.check_weights, weights, self._shapes, self._dtypes)
            how = await self._how(changes, entries)
            if how.reason:
                log.info("installing by a reload", version=version, reason=how.reason)
            given = str(changes) if how.in_place else None
            await ask_ranks(self._llm, "open_files", weights=str(weights), changes=given)
            while any(await ask_ranks(self._llm, "touch")):
                pass
        except Exception as error:
            await self._close(error)
            raise InvalidRequest(f"version {version} was refused: {error}", field="weights") from error
        return how

    async def apply(self, version: int, how: InstallMethod) -> None:
        """Replace the weights, and label their tokens; generation stands still. An error in here leaves a mixture."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"in_place": how.in_place}))
        await self._llm.update_weight_version(str(version))

    async def finish(self) -> None:
        """Close the files."""
        await self._llm.finish_weight_update()

    async def drop(self) -> None:
        """Give the weights' memory back; generation stands still until a whole version is applied."""
        await ask_ranks(self._llm, "drop")

    async def pool_bytes(self) -> int:
        """Bytes of one device that the engine gives back when it sleeps."""
        found: int = max(await ask_ranks(self._llm, "pool_bytes"))
        return found

    async def _close(self, refusal: Exception) -> None:
        try:
            await ask_ranks(self._llm, "close_files")
        except Exception as error:
            raise EngineFailed(f"a version's files cannot be closed ({error}) after {refusal}") from error

    async def _how(self, changes: Path | None, entries: dict[str, version_files.ChangeEntry]) -> InstallMethod:
        if changes is None or any(self._obstacles):
            return version_files.how_to_install(None if changes is None else "", self._obstacles)
        refused = await asyncio.to_thread(version_files.why_not, changes, entries)
        return version_files.how_to_install(refused, self._obstacles)


async def ask_ranks(llm: Any, step: str, **arguments: Any) -> list[Any]:
    """One answer of each rank."""
    found: list[Any] = await llm.collective_rpc("ebbtide", args=(step,), kwargs=arguments)
    return found


def _as_boxes(found: Any) -> Boxes:
    """Boxes that arrived as lists."""
    return {name: tuple(tuple((a, b) for a, b in box) for box in boxes) for name, boxes in found.items()}
