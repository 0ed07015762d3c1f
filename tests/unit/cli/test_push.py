"""`ebbtide run push`: which checkpoint is uploaded, and what is said without one."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.commands.run import newest_checkpoint
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import CHECKPOINT
from ebbtide.types.run import EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus


class FakeClient:
    def __init__(self, folders: dict[int, Path]) -> None:
        self._folders = folders

    async def run(self, run_id: str) -> Run:
        spec = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"))
        return Run(run_id=run_id, spec=spec, status=RunStatus.FINISHED)

    async def watch(self, run_id: str) -> AsyncGenerator[RunEvent, None]:
        yield RunEvent(kind="step", values={"step": 30.0})
        for step, folder in self._folders.items():
            yield RunEvent(kind=CHECKPOINT, values={"step": float(step)}, labels={"path": str(folder)})


async def test_the_newest_checkpoint_is_taken_or_that_of_a_step(tmp_path: Path) -> None:
    folders = {step: tmp_path / f"step-{step:06d}" for step in (10, 20)}
    for folder in folders.values():
        folder.mkdir()
    client: Any = FakeClient(folders)
    assert await newest_checkpoint(client, "r", 0) == (20, folders[20])
    assert await newest_checkpoint(client, "r", 10) == (10, folders[10])


@pytest.mark.parametrize(
    ("folders", "step", "said"),
    [
        ({}, 0, "it has none yet"),
        ({10: Path("/nope")}, 20, "no checkpoint of step 20; it has 10"),
        ({10: Path("/nope")}, 0, "on the trainer's machine, or was removed"),
    ],
)
async def test_without_the_checkpoint_the_error_says_which_there_are(
    folders: dict[int, Path], step: int, said: str
) -> None:
    client: Any = FakeClient(folders)
    with pytest.raises(InvalidRequest, match=said) as refused:
        await newest_checkpoint(client, "r", step)
    assert refused.value.field == "--step"
