"""An engine comes back to a device only once it has room there."""

from pathlib import Path

import pytest

from ebbtide.grants import Page
from ebbtide.serving_guard.borrowers import Loan, LoanAccount
from ebbtide.serving_guard.trainer_lender import PhasedMemory
from ebbtide.types.grants import BorrowerReport, Hello, Residency

MIB = 1 << 20


class Gpu:
    def __init__(self) -> None:
        self.free = 0
        self.lost = False

    def memory(self) -> tuple[int, int]:
        if self.lost:
            raise RuntimeError("the GPU is lost")
        return self.free, 1000 * MIB


class Guard:
    """A device and the one engine on it."""

    def __init__(self, page: Page, held: Residency = Residency.AWAY, device: str = "GPU-1") -> None:
        self.gpu, self.lent = Gpu(), True
        self.memory = PhasedMemory(held, lambda: self.lent, device=lambda _: self.gpu, clock=lambda: 0.0)
        hello = Hello(protocol_version=1, worker_id="w", kv_bytes=100 * MIB, weights_bytes=50 * MIB, device=device)
        self.memory.joined("w", hello)
        self.loan = Loan(hello, (), page, LoanAccount(), 0.0)

    def wish(self, at: Residency) -> tuple[Residency, int]:
        self.memory.reported(0.0, "w", BorrowerReport(residency=at))
        found = self.memory.allowed(self.loan)
        return found.residency, found.kv_bytes // MIB


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path / "w.page", create=True)


def test_an_engine_gives_up_what_the_settings_say_while_the_trainer_has_the_device(page: Page) -> None:
    guard = Guard(page)
    guard.lent = False
    assert guard.wish(Residency.AWAKE) == (Residency.AWAY, 0)


def test_an_engine_waits_until_the_trainer_has_made_room(page: Page) -> None:
    guard = Guard(page)
    guard.gpu.free = 160 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAY, 0), "its pool and a reserve of 20 MiB"
    guard.gpu.free = 171 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAKE, 100)


def test_an_engine_that_has_its_memory_keeps_it_however_little_is_free(page: Page) -> None:
    assert Guard(page).wish(Residency.AWAKE) == (Residency.AWAKE, 100)


def test_a_device_that_cannot_be_read_has_no_room(page: Page) -> None:
    guard = Guard(page)
    guard.gpu.lost = True
    assert guard.wish(Residency.HOST) == (Residency.HOST, 0)


def test_the_trainer_is_told_what_an_engine_needs(page: Page) -> None:
    guard = Guard(page)
    assert guard.memory.engine_bytes() == 150 * MIB
    guard.memory.left("w")
    assert guard.memory.engine_bytes() == 0


@pytest.mark.parametrize(("held", "device"), [(Residency.AWAKE, "GPU-1"), (Residency.AWAY, "")])
def test_engines_that_give_nothing_up_or_have_no_gpu_ask_the_trainer_for_nothing(
    page: Page, held: Residency, device: str
) -> None:
    guard = Guard(page, held, device)
    assert guard.memory.engine_bytes() == 0
    assert guard.wish(Residency.AWAKE) == (Residency.AWAKE, 100)
