"""A trainer of several ranks lends the devices of two hosts by one decision, and has both when it is told so."""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from ebbtide.errors import EbbtideError, LeaseSuperseded, Unavailable
from ebbtide.trainer.lending.shared_loan import LendingRanks, LoanFollower, SharedLoan, own_place
from tests.fakes.rank_notes import SharedNotes
from tests.integration.serving_guard.borrower import Borrowing
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, rank_processes, trainer_guard_process
from tests.support.waiting import wait_until

#: The rank that leads the second host.
OTHER = 2
HOPELESS_S = 2.0


class Ranks:
    """A trainer's ranks on two hosts, in this process."""

    def __init__(self, folders: tuple[Path, Path], lease: int = 1) -> None:
        self.board = SharedNotes()
        places = {0: own_place(str(folders[0])), OTHER: own_place(str(folders[1]))}
        self.folders, self._lending = folders, LendingRanks(self.board, places)
        self.following: asyncio.Task[None]
        self.owning: asyncio.Task[None]
        self.claim(lease)

    def claim(self, lease: int) -> None:
        """The ranks' next run, or its next lease."""
        self.loan = SharedLoan(self.folders[0], self._lending, run_id="r", lease=lease, hopeless_s=HOPELESS_S)

    def start(self) -> None:
        self.following = asyncio.create_task(LoanFollower(self.folders[1], self.board, OTHER, silent_s=0.5).run())
        self.owning = asyncio.create_task(self.loan.run())

    async def __aenter__(self) -> "Ranks":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self.owning, self.following):
            task.cancel()
            with suppress(asyncio.CancelledError, EbbtideError):
                await task


@pytest.fixture
def folders(grant_dir: Path) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        path = Path(made) / "g"
        path.mkdir(0o700)
        yield grant_dir, path


class Hosts:
    def __init__(self, guards: list[TrainerGuardProcess]) -> None:
        self.guards = guards

    async def states(self) -> list[str]:
        return [(await one.status()).state for one in self.guards]


@pytest.fixture
async def hosts(folders: tuple[Path, Path]) -> AsyncIterator[Hosts]:
    async with AsyncExitStack() as stack:
        made = [
            stack.enter_context(trainer_guard_process(folder, trainer_silent_s=2.5, trainer_memory_s=1.0))
            for folder in folders
        ]
        for guard in made:
            await guard.ready()
        yield Hosts(made)


async def steps_on(*workers: Borrowing) -> None:
    stood = [worker.page.steps().steps for worker in workers]
    for worker, steps in zip(workers, stood, strict=True):
        await wait_until(lambda: worker.page.steps().steps > steps + 3, 20, what="steps")  # noqa: B023


async def test_one_decision_lends_the_devices_of_all_hosts_and_takes_them_back(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[0]) as one, Borrowing(folders[1]) as other:
            for _ in range(5):
                ranks.loan.lend()
                await steps_on(one, other)
                await asyncio.wait_for(ranks.loan.take_back(), 20)
                for worker in (one, other):
                    assert not worker.page.steps().stepping
                    assert not worker.page.offered().tokens
                assert await hosts.states() == ["held", "held"]
            assert len(wishes_of(ranks)) == 1, "notes that all have followed are removed"


async def test_a_step_waits_for_the_memory_of_the_slowest_host_after_all_compute_is_back(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[0]) as one, Borrowing(folders[1], manner="hoarding") as slow:
            ranks.loan.lend()
            await steps_on(one, slow)
            taking = asyncio.create_task(ranks.loan.take_back())
            await wait_until(lambda: waits_for_memory(hosts.guards[1]), 10)
            assert not taking.done()
            await asyncio.wait_for(taking, 20)
            assert slow.state() in "ZX", "its guard ended it"


def wishes_of(ranks: Ranks) -> list[str]:
    """The names of rank 0's notes that say what it wants of other hosts. Each new wish has a new name."""
    return sorted(name for name in ranks.board.notes if "/wish/" in name)


async def waits_for_memory(guard: TrainerGuardProcess) -> bool:
    found = await guard.status()
    return found.compute_back and not found.memory_back


async def test_an_older_trainer_is_refused_by_every_guard_also_by_one_that_was_started_again(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    older, newer = Ranks(folders, lease=1), Ranks(folders, lease=2)
    async with newer:
        await asyncio.wait_for(newer.loan.take_back(), 20)
    hosts.guards[1].end()
    await hosts.guards[1].start_again()
    # Only the second host's guard meets the older trainer's wish here: it knows it from its former life.
    follower = asyncio.create_task(LoanFollower(folders[1], older.board, OTHER).run())
    older.loan.lend()
    posting = asyncio.create_task(older.loan._post())
    watching = asyncio.create_task(older.loan._watch())
    with pytest.raises(LeaseSuperseded, match="newer lease"):
        await asyncio.wait_for(watching, 20)
    for task in (posting, follower):
        task.cancel()
    assert (await hosts.guards[1].status()).lease != 1


async def test_the_device_of_a_host_without_a_guard_and_without_engines_is_back_soon(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[0]) as one:
            ranks.loan.lend()
            await steps_on(one)
            hosts.guards[1].end()
            await asyncio.wait_for(ranks.loan.take_back(), 5)
            assert not one.page.steps().stepping
            assert not one.page.offered().tokens


async def test_an_engine_that_nobody_stops_ends_the_wait_with_its_hosts_name_and_frees_the_other_host(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[0]) as one, Borrowing(folders[1], manner="stuck") as stuck:
            ranks.loan.lend()
            await steps_on(one, stuck)
            (folders[1] / "stick").touch()
            await wait_until(lambda: stuck.page.steps().stepping)
            hosts.guards[1].end()
            name = own_place(str(folders[1])).host
            with pytest.raises(Unavailable, match=rf"host {name} \(rank 2\) does not give its device back"):
                await asyncio.wait_for(ranks.loan.take_back(), 30)
            ranks.owning.cancel()
            await steps_on(one)
            (folders[1] / "stick").unlink()


async def test_a_host_whose_guard_hangs_gives_its_device_back_once_no_engine_computes(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[0]) as one, Borrowing(folders[1]) as other:
            ranks.loan.lend()
            await steps_on(one, other)
            hosts.guards[1].process.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(ranks.loan.take_back(), 20)
            stood = other.page.steps().steps
            hosts.guards[1].process.send_signal(signal.SIGCONT)
            await wait_until(lambda: is_held(hosts.guards[1]), 10)
            assert other.page.steps().steps == stood, "the guard read the newest wish before it lent anything"


async def is_held(guard: TrainerGuardProcess) -> bool:
    return (await guard.status()).state == "held"


@pytest.mark.parametrize("how", ["gone", "frozen"])
async def test_a_host_lends_its_device_when_rank_0_is_gone_or_frozen_and_takes_it_back_for_the_next(
    hosts: Hosts, folders: tuple[Path, Path], how: str
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[1]) as other:
            await asyncio.wait_for(ranks.loan.take_back(), 20)
            ranks.owning.cancel()
            if how == "gone":
                ranks.board.gone = True
            else:
                ranks.board.answers.clear()
            await steps_on(other)
    async with Ranks(folders, lease=2) as again:
        await asyncio.wait_for(again.loan.take_back(), 20)
        assert await hosts.states() == ["held", "held"]


async def test_a_rank_0_that_was_frozen_has_the_devices_of_other_hosts_again_without_a_new_wish(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        with Borrowing(folders[1]) as other:
            await asyncio.wait_for(ranks.loan.take_back(), 20)
            wishes = wishes_of(ranks)
            ranks.board.answers.clear()
            await steps_on(other)
            ranks.board.answers.set()
            await wait_until(lambda: is_held(hosts.guards[1]), 20)
            assert wishes_of(ranks) == wishes


async def test_the_next_run_of_the_same_ranks_owns_all_devices_under_its_own_lease(
    hosts: Hosts, folders: tuple[Path, Path]
) -> None:
    async with Ranks(folders) as ranks:
        await asyncio.wait_for(ranks.loan.take_back(), 20)
        ranks.owning.cancel()
        with suppress(asyncio.CancelledError):
            await ranks.owning
        ranks.claim(7)
        ranks.owning = asyncio.create_task(ranks.loan.run())
        await asyncio.wait_for(ranks.loan.take_back(), 20)
        assert [(await one.status()).lease for one in hosts.guards] == [7, 7]


@pytest.mark.parametrize("killed", [0, 1])
async def test_the_devices_of_killed_ranks_are_lent_until_the_next_trainer_takes_all_back(
    hosts: Hosts, folders: tuple[Path, Path], killed: int
) -> None:
    with Borrowing(folders[0]) as one, Borrowing(folders[1]) as other:
        with rank_processes(folders, lease=1) as ranks:
            assert await hosts.states() == ["held", "held"]
            ranks[killed].kill()
            await steps_on((one, other)[killed])
            ranks[1 - killed].kill()
            await steps_on(one, other)
            assert await hosts.states() == ["abandoned", "abandoned"]
        with rank_processes(folders, lease=2):
            assert await hosts.states() == ["held", "held"]
            assert not any(worker.page.offered().tokens for worker in (one, other))
