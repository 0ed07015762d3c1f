"""Notes between ranks, in a real store of torch."""

import asyncio
from typing import cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ebbtide.client import Lease
from ebbtide.errors import Internal
from ebbtide.trainer.ranks.rank_faults import NOTE, failing_together
from ebbtide.trainer.ranks.rank_launcher import RankLost
from ebbtide.trainer.ranks.rank_world import RankBoard
from ebbtide.types.run import RunStatus


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Outlives boards, like that of torchrun's agent."""
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    return made


@pytest.mark.usefixtures("store")
async def test_restarted_ranks_see_each_others_notes_and_none_of_those_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    await RankBoard().put("place", b"old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    one, other = RankBoard(), RankBoard()
    assert await one.find(["place"]) == {}
    await other.put("place", b"new")
    assert await one.find(["place", "none"]) == {"place": b"new"}
    assert await one.await_one("place", 5.0) == b"new"
    await one.remove("place")
    assert await other.find(["place"]) == {}


@pytest.mark.usefixtures("store")
async def test_ranks_that_torchrun_did_not_start_share_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    await RankBoard().put("place", b"here")
    assert await RankBoard().await_one("place", 5.0) == b"here"


@pytest.mark.usefixtures("store")
async def test_a_version_that_failed_for_another_ranks_memory_ends_the_run_though_its_note_comes_later() -> None:
    board, told = RankBoard(), list[tuple[RunStatus, str]]()

    class Held:
        async def finish(self, status: RunStatus, message: str) -> None:
            told.append((status, message))

    async def publish() -> None:
        asyncio.get_running_loop().call_later(0.1, lambda: notes.append(asyncio.create_task(leave_note())))
        raise Internal("another rank's")

    async def leave_note() -> None:
        await RankBoard().put(NOTE, b"rank 1: reading the weights of a version ran out of memory")

    notes: list[asyncio.Task[None]] = []
    with pytest.raises(RankLost, match="one ran out of memory"):
        await failing_together(publish(), cast("Lease", Held()), board)
    assert told == [(RunStatus.FAILED, "rank 1: reading the weights of a version ran out of memory")]
