"""A version is checked, opened and mapped before anything stands still for it, and let go if it is refused."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.rollout_worker.engine.vllm.version_updates import VersionUpdates

torch = pytest.importorskip("torch")


class Llm:
    """Ranks that answer as told, and what they were asked."""

    def __init__(self, *obstacles: str) -> None:
        self._obstacles = obstacles
        self.asked: list[tuple[str, Any]] = []
        self.broken: set[str] = set()
        self.left = 2  # to map

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any], args: tuple[str, ...] = ()) -> list[Any]:
        step = args[0] if args else method
        self.asked.append((step, kwargs.get("changes")))
        if step in self.broken:
            raise RuntimeError("as told")
        if step == "touch":
            self.left -= 1
        if step == "report":
            return [[{"a": [[[0, 2], [0, 3]]]}, obstacle] for obstacle in self._obstacles]
        return [step == "touch" and self.left > 0 for _ in self._obstacles]

    @property
    def steps(self) -> list[str]:
        """What was asked once the engine was up."""
        return [step for step, _ in self.asked[2:]]


async def begin(*obstacles: str) -> tuple[VersionUpdates, Llm]:
    llm = Llm(*obstacles)
    return await VersionUpdates.learned(llm, {"a": (2, 3)}, {"a": "F32"}), llm


def files(directory: Path, *, shape: tuple[int, ...] = (2, 3), position: int = 1) -> tuple[Path, Path]:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(shape)}, directory / "weights")
    save_file({"a.indices": torch.tensor([position]), "a.values": torch.ones(1)}, directory / "changes")
    return directory / "weights", directory / "changes"


async def test_an_engine_knows_what_its_ranks_read() -> None:
    updates, _ = await begin("", "")
    assert updates.boxes == {"a": (((0, 2), (0, 3)),)}


async def test_all_of_a_version_is_mapped_before_it_is_applied(tmp_path: Path) -> None:
    updates, llm = await begin("")
    how = await updates.prepare(1, files(tmp_path)[0], None)
    assert not how.in_place
    assert llm.steps == ["open_files", "touch", "touch"]


async def test_changes_are_handed_on_where_every_rank_can_apply_them(tmp_path: Path) -> None:
    weights, changes = files(tmp_path)
    updates, llm = await begin("", "")
    assert (await updates.prepare(1, weights, changes)).in_place
    assert ("open_files", str(changes)) in llm.asked


@pytest.mark.parametrize(("obstacles", "position"), [(("", "packed"), 1), (("", ""), 6)])
async def test_else_the_whole_version_is_installed(tmp_path: Path, obstacles: tuple[str, ...], position: int) -> None:
    weights, changes = files(tmp_path, position=position)
    updates, llm = await begin(*obstacles)
    how = await updates.prepare(1, weights, changes)
    assert not how.in_place
    assert how.reason
    assert ("open_files", None) in llm.asked


async def test_a_version_of_another_model_is_never_opened(tmp_path: Path) -> None:
    updates, llm = await begin("")
    with pytest.raises(InvalidRequest, match="version 1 was refused: weights: are of another architecture: see a"):
        await updates.prepare(1, files(tmp_path, shape=(3, 2))[0], None)
    assert llm.steps == ["close_files"]


async def test_what_one_rank_cannot_open_all_let_go(tmp_path: Path) -> None:
    updates, llm = await begin("", "")
    llm.broken = {"open_files"}
    with pytest.raises(InvalidRequest, match="as told"):
        await updates.prepare(1, files(tmp_path)[0], None)
    assert llm.steps == ["open_files", "close_files"]


async def test_an_engine_that_cannot_let_go_is_lost(tmp_path: Path) -> None:
    updates, llm = await begin("")
    llm.broken = {"touch", "close_files"}
    with pytest.raises(EngineFailed):
        await updates.prepare(1, files(tmp_path)[0], None)
