"""`ebbtide worker drain` as a person meets it: it says how far it is, and what became of it."""

import io
from collections.abc import Iterator

import msgspec
import pytest
from rich.console import Console

from ebbtide.cli.views import fleet
from ebbtide.cli.views.fleet import drain_worker
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError, NotFound
from ebbtide.types.fleet import Worker, WorkerKind, WorkerState

WORKER = Worker(worker_id="w1", kind=WorkerKind.SPOT, state=WorkerState.READY, slots=8, running=5, uptime_s=50)


class Fleet:
    """Stands for a client: the worker as it stands at each look, the last of them for ever."""

    def __init__(self, *looks: Worker | None) -> None:
        self._looks: Iterator[Worker | None] = iter(looks)
        self._last: Worker | None = None
        self.asked: list[tuple[str, float]] = []
        self.listed = 0

    async def workers(self) -> list[Worker]:
        self.listed += 1
        self._last = next(self._looks, self._last)
        return [self._last] if self._last else []

    async def drain_worker(self, worker_id: str, within_s: float) -> int:
        self.asked.append((worker_id, within_s))
        if not self.listed:
            self._last = next(self._looks, None)
        if self._last is None:
            raise NotFound(f"no worker {worker_id} is attached")
        return self._last.running


def at(state: WorkerState, running: int, **more: float) -> Worker:
    return msgspec.structs.replace(WORKER, state=state, running=running, **more)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_LOOK_S", 0.001)


async def run(fleet: Fleet, *, wait: bool = True, within_s: float = 30.0) -> None:
    await drain_worker(fleet, "w1", within_s, wait=wait)  # type: ignore[arg-type]


async def test_it_waits_until_the_worker_has_left_and_tells_what_it_handed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet(WORKER, at(WorkerState.DRAINING, 5), at(WorkerState.DRAINING, 2), at(WorkerState.LOST, 0))
    await run(fleet)
    assert fleet.asked == [("w1", 30.0)]
    out = capsys.readouterr().out
    assert out.startswith("w1 has left after ")
    assert out.endswith("; it handed over 5 rollouts\n")


async def test_a_worker_that_is_listed_no_more_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    await run(Fleet(at(WorkerState.READY, 1), None))
    assert capsys.readouterr().out.endswith("it handed over 1 rollout\n")


async def test_another_process_under_its_name_is_not_waited_for() -> None:
    await run(Fleet(WORKER, at(WorkerState.READY, 3, uptime_s=1.0)))


async def test_on_a_terminal_a_coordinator_that_answers_is_not_said_to_be_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_LOOK_S", 0.05)
    screen = io.StringIO()
    monkeypatch.setattr(fleet, "Console", lambda file: Console(file=screen, force_terminal=True, width=120))
    with Waiting("the coordinator", first_s=0.3):
        await run(Fleet(WORKER, *[at(WorkerState.DRAINING, 5)] * 10, at(WorkerState.LOST, 0)))
    assert "w1 to hand over 5 rollouts within 30 s" in screen.getvalue()
    assert "waiting for" not in capsys.readouterr().err + screen.getvalue()


async def test_without_waiting_it_says_what_is_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(WORKER)
    await run(fleet, wait=False)
    assert capsys.readouterr().out == "w1 was asked to leave within 30 s; 5 rollouts to hand over\n"
    assert fleet.listed == 0  # however large the fleet


async def test_an_idle_worker_that_fell_silent_has_not_left(capsys: pytest.CaptureFixture[str]) -> None:
    frozen = msgspec.structs.replace(at(WorkerState.SUSPECTED, 0), reason="silent for 2.5 s")
    with pytest.raises(EbbtideError, match=r"w1 was given up \(silent for 2.5 s\) and has not said that it left"):
        await run(Fleet(WORKER, at(WorkerState.DRAINING, 0), frozen))
    assert "has left" not in capsys.readouterr().out


async def test_a_worker_that_is_lost_meanwhile_is_an_error_with_what_it_left_behind() -> None:
    lost = msgspec.structs.replace(at(WorkerState.LOST, 3), reason="its stream broke")
    with pytest.raises(EbbtideError, match=r"w1 was lost before it had handed over 3 rollouts \(its stream broke\)"):
        await run(Fleet(WORKER, at(WorkerState.DRAINING, 5), lost))


async def test_a_worker_that_does_not_leave_in_time_is_an_error_with_what_it_still_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "_GRACE_S", 0.0)
    with pytest.raises(EbbtideError, match=r"w1 is still there after 0 s with 3 rollouts: its log says why"):
        await run(Fleet(WORKER, at(WorkerState.DRAINING, 3)), within_s=0.02)


async def test_a_worker_that_is_not_there_is_an_error() -> None:
    with pytest.raises(NotFound, match="no worker w1"):
        await run(Fleet(None))
