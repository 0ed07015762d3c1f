"""Brings versions into the processes of one vLLM engine: before generation stops, while it stands still, and after.

A version's files (`Engine.install`) are checked in the worker's process and on its CPU before generation stops; engine
processes read the same files.

Invariant: an engine process has a version's files open only between `prepare` and `finish`; only `apply` writes. The
worker's process imports this before torch is prepared: nothing here imports torch or vLLM at once.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Boxes, EngineFailed, Shapes
from ebbtide.rollout_worker.engine.checkpoint_facts import misfits
from ebbtide.types.weights import Box

log = telemetry.get_logger(__name__)

INDICES: Final = ".indices"
VALUES: Final = ".values"
#: Types that a loader turns into each other.
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


class ChangeEntry(NamedTuple):
    """One tensor, by a file's header."""

    dtype: str  # in safetensors' names
    shape: tuple[int, ...]


class InstallMethod(NamedTuple):
    """How a version gets into an engine: in place, or else by a reload."""

    in_place: bool
    reason: str = ""  # for the reload, if there were changes


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
            entries = await asyncio.to_thread(check_weights, weights, self._shapes, self._dtypes)
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

    async def _how(self, changes: Path | None, entries: dict[str, ChangeEntry]) -> InstallMethod:
        if changes is None or any(self._obstacles):
            return how_to_install(None if changes is None else "", self._obstacles)
        refused = await asyncio.to_thread(why_not, changes, entries)
        return how_to_install(refused, self._obstacles)


async def ask_ranks(llm: Any, step: str, **arguments: Any) -> list[Any]:
    """One answer of each rank."""
    found: list[Any] = await llm.collective_rpc("ebbtide", args=(step,), kwargs=arguments)
    return found


def _as_boxes(found: Any) -> Boxes:
    """Boxes that arrived as lists."""
    return {name: tuple(tuple((a, b) for a, b in box) for box in boxes) for name, boxes in found.items()}


def how_to_install(changes: str | None, obstacles: Sequence[str]) -> InstallMethod:
    """`changes`: why they cannot be applied; empty: they can; None: there are none. `obstacles`: each rank's."""
    if changes is None:
        return InstallMethod(in_place=False)
    reason = next((reason for reason in [*obstacles, changes] if reason), "")
    return InstallMethod(in_place=not reason, reason=reason)


def check_weights(weights: Path, shapes: Shapes, dtypes: Mapping[str, str]) -> dict[str, ChangeEntry]:
    """The tensors in `weights`. Raises `InvalidRequest` unless they are exactly those of the model."""
    try:
        with _open(weights) as file:
            found = {name: _entry(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot be read: {error}", field="weights") from error
    if names := misfits({name: entry.shape for name, entry in found.items()}, shapes):
        raise InvalidRequest(f"are of another architecture: see {names}", field="weights")
    for name, entry in found.items():
        if entry.dtype != dtypes[name] and not {entry.dtype, dtypes[name]} <= _FLOATS:
            raise InvalidRequest(f"{name} is {entry.dtype}, where the model's is {dtypes[name]}", field="weights")
    return found


def why_not(changes: Path, entries: Mapping[str, ChangeEntry]) -> str:
    """Why `changes` cannot be applied to weights of these `entries` in place; empty if they can.

    This also finds faults that vLLM would find only while it is writing: it marks unchanged elements by NaN.
    """
    try:
        with _open(changes) as file:
            names = set(file.keys())
            for name in sorted({name.removesuffix(INDICES).removesuffix(VALUES) for name in names}):
                if name not in entries or not {name + INDICES, name + VALUES} <= names:
                    return f"the changes of {name} are not those of a tensor"
                if found := _fault(file, name, entries[name]):
                    return f"the changes of {name} {found}"
    except (OSError, ValueError) as error:
        return f"the changes cannot be read: {error}"
    return ""


def _fault(file: Any, name: str, entry: ChangeEntry) -> str:
    """The fault in the changes of one tensor, a verb first; empty if there is none."""
    import torch

    if _entry(file.get_slice(name + VALUES)).dtype != entry.dtype:
        return "are of another type than it"
    indices, values = file.get_tensor(name + INDICES), file.get_tensor(name + VALUES)
    if indices.dtype != torch.int64 or indices.ndim != 1 or indices.shape != values.shape:
        return "lack a position for each value"
    if len(indices) and not (
        indices[0] >= 0 and indices[-1] < torch.Size(entry.shape).numel() and (indices[1:] > indices[:-1]).all()
    ):
        return "have positions that do not ascend within it"
    if not values.is_floating_point() or values.isnan().any():
        return "are not all numbers of floating point"
    return ""


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _entry(part: Any) -> ChangeEntry:
    return ChangeEntry(part.get_dtype(), tuple(part.get_shape()))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of that shape."""
    return tuple((0, length) for length in shape)


def viewed(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> Box | None:
    """The slice of a contiguous tensor of `shape` with just the elements of the view (offset, size, stride; in
    elements), however the view orders, splits or merges dimensions. None if those elements are no slice: with a step,
    for example, or across the ends of rows."""
    if 0 in size:
        return tuple((0, 0) for _ in shape) or None
    strides = _strides(shape)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    box = tuple(
        (offset // step % length, last // step % length + 1) for length, step in zip(shape, strides, strict=True)
    )
    lengths = [stop - start for start, stop in box]
    inside = all(length > 0 for length in lengths)
    return box if inside and _runs(lengths, strides) == _runs(size, stride) else None


def union(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements in fewer slices: contained ones vanish, adjoining or overlapping ones in line become one."""
    merged: list[Box] = []
    for box in boxes:
        grown = box
        while (index := next((i for i, other in enumerate(merged) if _joined(grown, other)), None)) is not None:
            grown = _joined(grown, merged.pop(index)) or grown
        merged.append(grown)
    return tuple(sorted(merged))


def together(ranks: Sequence[Boxes | None]) -> Boxes | None:
    """The slices that any rank of an engine reads; None, everything, if one of them cannot tell."""
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    names = dict.fromkeys(name for rank in known for name in rank)
    return {name: union(box for rank in known for box in rank.get(name, ())) for name in names}


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = list[int](), 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]


def _runs(size: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """The (step, length) pairs in a normal form: two views with the same offset and runs show the same elements."""
    runs: list[tuple[int, int]] = []
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 1 or step == 0:  # step 0: an expanded dimension shows the same elements again
            continue
        if runs and runs[-1][0] * runs[-1][1] == step:
            runs[-1] = (runs[-1][0], runs[-1][1] * length)
        else:
            runs.append((step, length))
    return runs


def _joined(one: Box, other: Box) -> Box | None:
    """One slice for both, if there is one: they differ in at most one dimension, or one contains the other."""
    hull = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    if hull in {one, other}:
        return hull
    differing = [(a, b, c, d) for (a, b), (c, d) in zip(one, other, strict=True) if (a, b) != (c, d)]
    if len(differing) > 1:
        return None
    ((a, b, c, d),) = differing
    return hull if max(a, c) <= min(b, d) else None
