"""Trainers of two runs take turns on a device: whoever dies or hangs in its turn loses it, and the other goes on."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.runtime import Shutdown
from ebbtide.serving_guard import borrower_processes
from ebbtide.serving_guard.borrower_processes import BorrowerProcess
from ebbtide.serving_guard.settings import GuardSettings, TurnSettings
from ebbtide.serving_guard.turns_lender import TurnsLender, ledger_path, read_turns
from ebbtide.trainer.lending.device_loan import DeviceLoan
from ebbtide.trainer.lending.shared_loan import LendingRanks, LoanFollower, SharedLoan, own_place
from ebbtide.types.grants import LOANS_VERSION, OwnerWish
from ebbtide.v1 import loans_pb2
from ebbtide.wire import to_proto
from tests.fakes.rank_notes import SharedNotes
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, trainer_guard_process
from tests.integration.serving_guard.turn_trainers import TurnTrainerProcess, check_turns, turn_trainer
from tests.support.waiting import wait_until

SILENT_S, REJOIN_S = 2.5, 1.5
#: Beyond the guard's patience: looks of the guard, the kill, and a step of the other trainer on a busy machine.
SLACK_S = 5.0


@pytest.fixture
async def guard(grant_dir: Path) -> AsyncIterator[TrainerGuardProcess]:
    with trainer_guard_process(grant_dir, owner="turns", turns_silent_s=SILENT_S, turns_rejoin_s=REJOIN_S) as made:
        await made.ready()
        yield made


async def in_turn(trainer: TurnTrainerProcess, guard: TrainerGuardProcess) -> dict[str, float]:
    """Wait until the trainer is in its turn. Returns what it told of it."""
    while True:
        turn, status = await trainer.turn(), await guard.status()
        if (status.state, status.turn) == ("held", turn["turn"]):
            return turn


async def test_two_trainers_take_turns_and_nobody_else_has_the_device(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with turn_trainer(grant_dir, "a", model=True) as one, turn_trainer(grant_dir, "b", model=True) as other:
        turns = {name: [await each.turn() for _ in range(5)] for name, each in (("a", one), ("b", other))}
        status = await guard.status()
        assert status.turn >= 9
        assert status.take_backs >= 8
        assert not status.lost
    records = check_turns(grant_dir)
    runs = {record.turn: record.run_id for record in records if record.began}
    for name, told in turns.items():
        assert {runs[int(turn["turn"])] for turn in told} == {name}
    first, last = turns["b"][0]["turn"], turns["b"][-1]["turn"]
    assert "".join(runs[number] for number in sorted(runs) if first <= number <= last) == "babababab"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
async def test_who_dies_or_hangs_in_its_turn_loses_it_and_the_other_goes_on(
    guard: TrainerGuardProcess, grant_dir: Path, how: signal.Signals
) -> None:
    given = {"stays_s": 0.2, "model": True}
    with turn_trainer(grant_dir, "a", **given) as first, turn_trainer(grant_dir, "b", **given) as second:
        await second.turn()
        struck = await in_turn(first, guard)
        first.process.send_signal(how)
        began = time.monotonic()
        while (turn := await second.turn())["turn"] < struck["turn"]:
            pass
        waited_s = turn["at_s"] - began
        assert turn["turn"] == struck["turn"] + 1
        assert waited_s < (SILENT_S if how is signal.SIGSTOP else 0.0) + SLACK_S
        assert await asyncio.to_thread(first.process.wait, 10) == -signal.SIGKILL
        assert (await guard.status()).lost == 1
        with turn_trainer(grant_dir, "a", lease=2) as again:
            await again.turn()
            await second.turn()
    lost = [record for record in check_turns(grant_dir) if not record.began and record.reason]
    assert lost[0].turn == struck["turn"]
    assert lost[0].run_id == "a"
    assert ("silent" in lost[0].reason) is (how is signal.SIGSTOP)


@pytest.mark.timeout(120)
async def test_a_guard_that_is_killed_finds_the_trainer_in_its_turn_again_and_nobody_loses_it(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with turn_trainer(grant_dir, "a", stays_s=0.3) as first, turn_trainer(grant_dir, "b", stays_s=0.3) as second:
        for one in (first, second, first):
            await in_turn(one, guard)
            guard.end()
            await guard.start_again()
        await asyncio.gather(first.turn(), second.turn())
        assert not (await guard.status()).lost
        assert first.process.poll() is None
        assert second.process.poll() is None
    check_turns(grant_dir)


@pytest.mark.timeout(120)
async def test_a_trainer_that_died_in_its_turn_while_no_guard_ran_holds_up_nobody(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with turn_trainer(grant_dir, "a", stays_s=0.3) as first, turn_trainer(grant_dir, "b", stays_s=0.3) as second:
        await second.turn()
        struck = await in_turn(first, guard)
        guard.end()
        first.process.kill()
        first.process.wait()
        await guard.start_again()
        while (turn := await second.turn())["turn"] < struck["turn"]:
            pass
        assert turn["turn"] == struck["turn"] + 1
    check_turns(grant_dir)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def test_a_process_without_a_seat_is_refused_and_not_killed(
    guard: TrainerGuardProcess, grant_dir: Path, stranger: subprocess.Popen[bytes]
) -> None:
    loan = DeviceLoan(grant_dir, run_id="r", lease=1, pids=[stranger.pid])
    running = asyncio.create_task(loan.run())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loan.take_back(), 1.0)
    running.cancel()
    assert f"process {stranger.pid} has not mapped {stranger.pid}.seat" in loan.progress().waits_for
    assert stranger.poll() is None
    assert not read_turns(grant_dir)


async def test_a_worker_is_not_lent_the_device(guard: TrainerGuardProcess, grant_dir: Path) -> None:
    with Borrowing(grant_dir) as worker:
        await asyncio.sleep(0.5)
        assert not worker.page.steps().steps
    assert (await guard.status()).state == "free"


async def test_a_trainer_that_lends_is_told_that_this_device_has_turns(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    loan = DeviceLoan(grant_dir, run_id="r", lease=1)
    running = asyncio.create_task(loan.run())
    await wait_until(lambda: "trainers take turns on this device" in loan.progress().waits_for)
    running.cancel()
    assert not read_turns(grant_dir)


async def test_a_line_that_a_guard_did_not_finish_is_no_turn(guard: TrainerGuardProcess, grant_dir: Path) -> None:
    with turn_trainer(grant_dir, "a") as one:
        await one.turn()
    guard.end()
    whole = [record for record in read_turns(grant_dir) if record.began]
    with ledger_path(grant_dir).open("ab") as ledger:
        ledger.write(b"\n" + json.dumps({"turn": 99}).encode()[:-1])
    await guard.start_again()
    with turn_trainer(grant_dir, "b") as one:
        assert (await one.turn())["turn"] == whole[-1].turn + 1


async def test_a_turn_that_is_given_back_as_it_is_lost_has_its_end_in_the_ledger(
    grant_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(processes: object, number: object) -> int:
        return 0

    monkeypatch.setattr(borrower_processes, "send", too_late)
    settings = GuardSettings(owner="turns", grant_dir=str(grant_dir), turns=TurnSettings(turn_s=0.01))
    lender, lost = TurnsLender(settings), asyncio.Event()
    with seated([grant_dir]) as pid:
        wish = OwnerWish(protocol_version=LOANS_VERSION, run_id="a", owner="o", lease=1, pids=(pid,))

        async def wishes() -> AsyncIterator[loans_pb2.OwnerWish]:
            yield to_proto(wish, loans_pb2.OwnerWish)
            await lost.wait()
            yield to_proto(replace(wish, sequence=1, lend=True), loans_pb2.OwnerWish)

        await lender.start(Shutdown("guard", settings))
        states = asyncio.create_task(_all(lender.serve(wishes())))
        await wait_until(lambda: bool(lender.device_status().waits_for))
        lost.set()
        await asyncio.wait_for(states, 10)
        await lender.stop()
    (record,) = (record for record in check_turns(grant_dir) if not record.began)
    assert "longer than" in record.reason


async def _all(states: AsyncIterator[object]) -> list[object]:
    return [state async for state in states]


#: A process with a seat in each of the folders that it is given.
_SEATED = (
    "import pathlib, sys, time; from ebbtide.trainer.lending.turn_loan import DeviceSeat\n"
    "seats = [DeviceSeat(pathlib.Path(folder)) for folder in sys.argv[1:]]; print(flush=True); time.sleep(600)"
)
OTHER = 2


@contextmanager
def seated(folders: list[Path]) -> Iterator[int]:
    command = [sys.executable, "-c", _SEATED, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@asynccontextmanager
async def ranks_on(folders: list[Path], run_id: str) -> AsyncIterator[SharedLoan]:
    """A trainer whose rank 0 is on the first host, and another rank on the second."""
    with seated(folders) as pid:
        board = SharedNotes()
        places = {
            rank: replace(own_place(str(one)), pids=(pid,)) for rank, one in zip((0, OTHER), folders, strict=True)
        }
        loan = SharedLoan(folders[0], LendingRanks(board, places), run_id=run_id, lease=1, turns=True)
        follower = LoanFollower(folders[1], board, OTHER, pids=(pid,))
        tasks = [asyncio.create_task(work) for work in (loan.run(), follower.run())]
        try:
            yield loan
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_ranks_of_a_trainer_that_stays_away_in_its_turn_are_killed_before_the_next_turn(
    guard: TrainerGuardProcess, grant_dir: Path
) -> None:
    with seated([grant_dir]) as one, seated([grant_dir]) as other, turn_trainer(grant_dir, "b") as second:
        loan = DeviceLoan(grant_dir, run_id="a", lease=1, pids=[one, other])
        running = asyncio.create_task(loan.run())
        await asyncio.wait_for(loan.take_back(), 10)
        turn = loan.turn
        running.cancel()
        while (later := await second.turn())["turn"] < turn:
            pass
        assert later["turn"] == turn + 1
        assert not any(borrower_processes.alive(process) for pid in (one, other) for process in _named(grant_dir, pid))
    lost = [record for record in check_turns(grant_dir) if record.turn == turn and not record.began]
    assert "its stream has ended" in lost[0].reason


def _named(folder: Path, pid: int) -> list[BorrowerProcess]:
    """The process in the ledger."""
    seats = {seat for record in read_turns(folder) for seat in record.seats if seat.pid == pid}
    return [BorrowerProcess(seat.pid, seat.started) for seat in seats]


@pytest.fixture
def second_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        path = Path(made) / "g"
        path.mkdir(0o700)
        yield path


@pytest.mark.timeout(60)
async def test_trainers_with_ranks_on_two_hosts_have_both_devices_or_none_and_never_one_each(
    guard: TrainerGuardProcess, grant_dir: Path, second_dir: Path
) -> None:
    folders, computing, most = [grant_dir, second_dir], 0, 0

    async def train(loan: SharedLoan) -> None:
        nonlocal computing, most
        for _ in range(6):
            await asyncio.wait_for(loan.take_back(), 20)
            computing += 1
            most = max(most, computing)
            await asyncio.sleep(0.01)
            computing -= 1
            loan.lend()

    with trainer_guard_process(second_dir, owner="turns") as other:
        await other.ready()
        # Rank 0 of each is where the other one's is not: each would have its own host's device first.
        async with ranks_on(folders, "a") as first, ranks_on(folders[::-1], "b") as second:
            await asyncio.gather(train(first), train(second))
            for one in (guard, other):
                await wait_until(partial(_free, one), 10)
    assert most == 1
    for folder in folders:
        assert len([record for record in check_turns(folder) if record.began]) == 12


async def _free(guard: TrainerGuardProcess) -> bool:
    return (await guard.status()).state == "free"
