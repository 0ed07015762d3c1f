"""Notes between ranks, in a real store of torch."""

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ebbtide.trainer.ranks.rank_board import RankBoard


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
