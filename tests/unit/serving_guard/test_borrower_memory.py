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

    def __init__(self, page: Page, held: Residency = Residency.AWAY, device: str = "GPU-1", *, slots: int = 8) -> None:
        self.gpu, self.lent = Gpu(), True
        self.memory = PhasedMemory(held, lambda: self.lent, device=lambda _: self.gpu, clock=lambda: 0.0)
        self._page, self._device, self._slots = page, device, slots
        self.loans = {name: self.join(name) for name in "w"}

    def join(self, name: str) -> Loan:
        hello = Hello(
            protocol_version=1,
            worker_id=name,
            slots=self._slots,
            kv_bytes=100 * MIB,
            weights_bytes=50 * MIB,
            device=self._device,
        )
        self.memory.joined(name, hello)
        return Loan(hello, (), self._page, LoanAccount(), 0.0)

    def wish(self, at: Residency | None, name: str = "w", *, moving: bool = False) -> tuple[Residency, int]:
        """What its grant says. `at`: of its report; None: there was none yet."""
        if at is not None:
            self.memory.reported(0.0, name, BorrowerReport(residency=at, moving=moving))
        found = self.memory.allowed(self.loans[name])
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


@pytest.mark.parametrize("held", [Residency.AWAKE, Residency.HOST, Residency.AWAY])
def test_an_engine_boots_once_the_device_is_lent_and_has_room(page: Page, held: Residency) -> None:
    """Whatever engines that are there may keep meanwhile: it says that it has nothing on the device."""
    guard = Guard(page, held, slots=0)
    guard.lent = False
    guard.gpu.free = 1000 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAY, 0), "the trainer has its device"
    assert guard.memory.engine_bytes() == 150 * MIB, "for which the trainer makes room"
    guard.lent, guard.gpu.free = True, 160 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAY, 0), "the trainer still moves out"
    guard.gpu.free = 171 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAKE, 100)


@pytest.mark.parametrize("held", [Residency.AWAKE, Residency.AWAY])
def test_an_engine_that_was_announced_is_not_there_before_its_first_report_either(page: Page, held: Residency) -> None:
    guard = Guard(page, held, slots=0)
    assert guard.memory.engine_bytes() == 150 * MIB
    assert guard.wish(None) == (Residency.AWAY, 0), "without room"
    guard.lent, guard.gpu.free = False, 1000 * MIB
    assert guard.wish(None) == (Residency.AWAY, 0), "in the trainer's step"


def test_of_two_engines_one_comes_at_a_time_and_what_it_took_does_not_turn_it_back(page: Page) -> None:
    guard = Guard(page, slots=0)
    guard.loans["v"] = guard.join("v")
    guard.gpu.free = 200 * MIB
    assert guard.wish(Residency.AWAY) == (Residency.AWAKE, 100)
    assert guard.wish(Residency.AWAY, "v") == (Residency.AWAY, 0), "the room is promised"
    guard.gpu.free = 120 * MIB
    assert guard.wish(Residency.AWAY, moving=True) == (Residency.AWAKE, 100), "it has a part of it already"
    guard.gpu.free = 200 * MIB
    assert guard.wish(Residency.AWAY, "v") == (Residency.AWAY, 0), "the other has not all of its memory"
    guard.wish(Residency.AWAKE)
    assert guard.wish(Residency.AWAY, "v") == (Residency.AWAKE, 100)


def test_an_engine_that_boots_into_a_take_back_keeps_its_room(page: Page) -> None:
    guard = Guard(page, slots=0)
    guard.loans["v"] = guard.join("v")
    guard.gpu.free = 200 * MIB
    guard.wish(Residency.AWAY)
    guard.wish(Residency.AWAY, moving=True)
    guard.lent = False
    assert guard.wish(Residency.AWAY, moving=True) == (Residency.AWAY, 0)
    guard.lent = True
    assert guard.wish(Residency.AWAY, "v") == (Residency.AWAY, 0)
    guard.loans["w"] = guard.join("w")  # its stream broke
    guard.wish(Residency.AWAY, moving=True)
    assert guard.wish(Residency.AWAY, "v") == (Residency.AWAY, 0)
