"""What ended runs may keep of their past, beside one whose data is broken."""

import time

import pytest

from ebbtide.coordinator.attempt_transitions import EndedHistories
from ebbtide.errors import Internal, StoreUnavailable
from ebbtide.store.runs import EndedHistory


class Store:
    """Has a history of 10 bytes of each run; dropping that of a run may raise."""

    def __init__(self) -> None:
        self.runs = self
        self.errors: dict[str, Exception] = {}
        self.dropped: list[str] = []

    async def ended_history(self, run_id: str) -> EndedHistory:
        return EndedHistory(run_id, time.time() + int(run_id), 10)

    async def drop_history(self, run_id: str) -> None:
        if (error := self.errors.pop(run_id, None)) is not None:
            raise error
        self.dropped.append(run_id)


async def test_a_history_that_cannot_be_deleted_keeps_no_other() -> None:
    store = Store()
    store.errors["1"] = Internal("broken")
    histories = EndedHistories(store, most_bytes=10, keep_s=1000.0)  # type: ignore[arg-type] # an imitation
    for run_id in ("1", "2", "3"):
        await histories.add(run_id)
    await histories.bound()
    assert store.dropped == ["2"]
    await histories.bound()
    assert store.dropped == ["2"]


async def test_a_history_is_deleted_later_if_the_store_is_away() -> None:
    store = Store()
    store.errors["1"] = StoreUnavailable("away")
    histories = EndedHistories(store, most_bytes=10, keep_s=1000.0)  # type: ignore[arg-type] # an imitation
    for run_id in ("1", "2"):
        await histories.add(run_id)
    with pytest.raises(StoreUnavailable):
        await histories.bound()
    await histories.bound()
    assert store.dropped == ["1"]
