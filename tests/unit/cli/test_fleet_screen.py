"""What a person sees of the fleet."""

import asyncio
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ebbtide.cli.views.fleet import fleet_line, fleet_table, watch_fleet, worker_line, worker_table
from ebbtide.cli.views.run import detail_table, run_table
from ebbtide.types.fleet import BorrowedState, Worker, WorkerKind, WorkerState
from ebbtide.types.run import EnvironmentSpec, Run, RunSpec, RunStatus
from ebbtide.types.weights import PolicyVersion
from tests.support.waiting import wait_until

SPEC = RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"))

BUSY = Worker(
    worker_id="w1", kind=WorkerKind.SPOT, state=WorkerState.READY, slots=64, running=40, waiting=8, plateau=32,
    tokens_per_s=1234.4, tokens_generated=987654, last_heartbeat_s=0.42,
    installed=(PolicyVersion(policy="policy", version=12),),
)  # fmt: skip


def shown(*workers: Worker) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(fleet_table(workers))
    return out.getvalue()


def test_the_table_tells_load_speed_plateau_version_heartbeat_and_tokens() -> None:
    (_, row) = shown(BUSY).splitlines()
    cells = row.split()
    assert cells[:2] == ["w1", "spot"]
    assert cells[2:] == ["generates", "40/8/64", "32", "1,234", "12", "0.4", "s", "987,654"]


@pytest.mark.parametrize("reason", ["[/models/x] cannot be read", "list[str] expected", "[bold]", "\x1b[2J\x07\r\nx"])
def test_a_reason_is_shown_as_it_is_but_for_what_a_terminal_would_obey(reason: str) -> None:
    worker = msgspec.structs.replace(BUSY, state=WorkerState.SUSPECTED, reason=reason)
    printable = "".join(one if one.isprintable() else " " for one in reason)
    run = Run(run_id="r", spec=SPEC, status=RunStatus.FAILED, counters={}, message=reason, holders={"trainer": reason})
    tables = (fleet_table([worker]), worker_table([worker]), run_table([run]), detail_table(run))
    for table in tables:
        out = io.StringIO()
        Console(file=out, width=200).print(table)
        assert "\x1b" not in out.getvalue()
        assert printable.strip() in out.getvalue() or table is tables[1]
    assert printable in worker_line(worker)


def test_the_table_tells_the_slots_that_a_workers_memory_allows_and_the_learnt_pace_of_a_rollout() -> None:
    (_, row) = shown(msgspec.structs.replace(BUSY, offered_slots=48, rollout_tokens_per_s=31.26)).splitlines()
    assert row.split()[3:6] == ["40/8/48", "32", "1,234/31"]


def test_what_is_not_known_yet_is_no_number() -> None:
    (_, row) = shown(msgspec.structs.replace(BUSY, plateau=0, installed=())).splitlines()
    assert row.split()[-6:-2] == ["-", "1,234", "-", "0.4"]


@pytest.mark.parametrize(
    ("state", "more", "said"),
    [
        (WorkerState.SUSPECTED, {"reason": "no token for 4 s"}, ("suspected with 40 rollouts", "no token for 4 s")),
        (
            WorkerState.QUARANTINED,
            {"quarantined_s": 19.7, "reason": "lost 3 times"},
            ("gets no work for 20 s", "lost 3 times"),
        ),
        (WorkerState.DRAINING, {}, ("hands over",)),
        (WorkerState.LOST, {"reason": "its stream broke"}, ("lost with 40 rollouts", "its stream broke", "987,654")),
        (WorkerState.LOST, {"reason": "it closed its stream", "running": 0}, ("gone", "it closed its stream")),
    ],
)
def test_a_worker_in_trouble_is_shown_with_the_reason(
    state: WorkerState, more: dict[str, Any], said: tuple[str, ...]
) -> None:
    worker = msgspec.structs.replace(BUSY, state=state, **more)
    text = shown(worker)
    assert [word for word in said if word not in text] == []
    assert said[0] in worker_line(worker)
    assert worker.reason in worker_line(worker)


def test_it_fits_on_a_terminal_of_eighty_columns() -> None:
    suspected = msgspec.structs.replace(
        BUSY, worker_id="worker-2", state=WorkerState.SUSPECTED, reason="no token for 4 s"
    )
    out = io.StringIO()
    Console(file=out, width=80).print(fleet_table([BUSY, suspected]))
    text = out.getvalue()
    assert "…" not in text
    assert [word for word in ("suspected", "token", "4 s") if word not in text] == []


LENT = msgspec.structs.replace(
    BUSY, worker_id="w3", kind=WorkerKind.BORROWED, borrowed=BorrowedState(granted=True, share=0.62, spell_s=11.6)
)


def test_of_a_borrowed_worker_it_is_shown_what_its_host_lends_and_for_how_long() -> None:
    header, steady, lent = shown(BUSY, LENT).splitlines()
    assert header.split()[-1] == "lent"
    assert lent.rstrip().endswith("62% +12 s")
    assert steady.rstrip().endswith("987,654")
    assert worker_line(LENT).endswith("lent 62% +12 s")
    assert "lent" not in shown(BUSY)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"borrowed": BorrowedState(share=0.2, spell_s=40.0)}, ("paused for its host", "20% -40 s")),
        ({"borrowed": BorrowedState(asleep=True)}, ("sleeps",)),
        ({"given_up": True, "reason": "others have room for all"}, ("is given up: others have room for all",)),
    ],
)
def test_a_borrowed_worker_that_does_nothing_is_shown_with_what_it_waits_for(
    more: dict[str, Any], said: tuple[str, ...]
) -> None:
    text = shown(msgspec.structs.replace(LENT, **more))
    assert [word for word in said if word not in text] == []


@pytest.mark.parametrize("state", [WorkerState.LOST, WorkerState.SUSPECTED])
def test_of_a_worker_that_is_gone_nothing_is_shown_that_is_not_so_any_more(state: WorkerState) -> None:
    text = shown(msgspec.structs.replace(BUSY, state=state))
    assert "1,234" not in text
    assert "40/8/64" not in text


def test_the_fleet_in_a_line_counts_who_is_there() -> None:
    lost = msgspec.structs.replace(BUSY, worker_id="w2", state=WorkerState.LOST)
    assert fleet_line([BUSY, lost]) == "1 workers, 1 gone lately · 40/64 rollouts · 1,234 tokens/s"


class Listing:
    """Stands for a client: lists one worker, and counts how often it was asked."""

    coordinator = "127.0.0.1:1"

    def __init__(self) -> None:
        self.asked = 0

    async def workers(self) -> list[Worker]:
        self.asked += 1
        return [BUSY]


@pytest.mark.parametrize("terminal", [True, False])
async def test_watching_looks_again_and_again_and_draws_only_on_a_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    listing, out = Listing(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    watching = asyncio.create_task(watch_fleet(listing, 0.01, console))  # type: ignore[arg-type]
    await wait_until(lambda: listing.asked >= 3)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    lines = capsys.readouterr().out.splitlines()
    assert ("987,654" in out.getvalue()) is terminal
    assert (sum("w1 generates; load 40/8/64" in line for line in lines) >= 2) is not terminal
    assert "\x1b" not in "".join(lines)
