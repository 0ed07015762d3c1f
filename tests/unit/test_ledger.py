"""The ledger counts what left an engine, whatever becomes of the process that counted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide import ledger as module
from ebbtide.errors import InvalidRequest
from ebbtide.ledger import AttemptRecord, Ledger, read_ledger
from ebbtide.types.fleet import AttemptRef

WRITER = """
import os, sys, time
from pathlib import Path
from ebbtide.ledger import Ledger
from ebbtide.types.fleet import AttemptRef
ledger = Ledger(Path(sys.argv[1]))
entry = ledger.open(AttemptRef("run", "s0.g0.0.t0", "a1"), 7)
for _ in range(1000):
    ledger.add(entry, 3)
print("counted", flush=True)
time.sleep(60)
"""


def ref(number: int) -> AttemptRef:
    return AttemptRef("run-1", f"s0.g{number}.0.t0", f"attempt{number}")


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        entry = ledger.open(ref(1), 12)
        ledger.add(entry, 5)
        ledger.add(entry, 1)
    assert read_ledger(tmp_path / "ledger") == [AttemptRecord("run-1", "s0.g1.0.t0", "attempt1", 12, 6)]


def test_tokens_counted_before_a_sigkill_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "counted\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert read_ledger(path) == [AttemptRecord("run", "s0.g0.0.t0", "a1", 7, 3000)]


def test_it_grows_and_keeps_open_entries_valid(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        entries = [ledger.open(ref(number), 0) for number in range(3000)]
        for number, entry in enumerate(entries):
            ledger.add(entry, number)
    records = read_ledger(tmp_path / "ledger")
    assert [record.generated for record in records] == list(range(3000))
    assert records[2999].rollout_id == "s0.g2999.0.t0"


def test_it_is_bounded_and_forgets_the_oldest_attempts_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 1024)
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        lasting = ledger.open(ref(0), 0)
        size = path.stat().st_size
        for number in range(1, 3000):
            ledger.end(entry := ledger.open(ref(number), number))
            ledger.add(lasting, 1)
            ledger.add(entry, 1)
    for number in range(3000, 3003):  # so do workers that are started again
        with Ledger(path) as ledger:
            ledger.open(ref(number), number)
    assert path.stat().st_size == size
    records = read_ledger(path)
    assert sorted(record.start for record in records) == [0, *range(1980, 3003)]
    assert [record.start for record in records if record.start] == list(range(1980, 3003)), "oldest first"
    assert {record.generated for record in records if not record.start} == {2999}
    assert [record.start for record in read_ledger(path, newest=2)] == [3001, 3002]


@pytest.mark.parametrize("written", [0, 5, 1024, 1500, 2048, 2050])
@pytest.mark.parametrize("newest", [1, 7, 1000, 1024, 5000])
def test_the_newest_are_those_of_all_also_where_places_were_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, newest: int
) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 1024)
    with Ledger(tmp_path / "ledger") as ledger:
        for number in range(written):
            ledger.end(ledger.open(ref(number), number))
    assert read_ledger(tmp_path / "ledger", newest=newest) == read_ledger(tmp_path / "ledger")[-newest:]


def test_while_more_attempts_run_than_it_keeps_none_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 8)
    with Ledger(tmp_path / "ledger") as ledger:
        entries = [ledger.open(ref(number), 0) for number in range(20)]
        for number, entry in enumerate(entries):
            ledger.add(entry, number)
    assert [record.generated for record in read_ledger(tmp_path / "ledger")] == list(range(20))


def test_a_restarted_worker_appends_to_its_ledger(tmp_path: Path) -> None:
    for number in range(3):
        with Ledger(tmp_path / "ledger") as ledger:
            ledger.add(ledger.open(ref(number), 0), number + 1)
    assert [record.generated for record in read_ledger(tmp_path / "ledger")] == [1, 2, 3]


def test_a_torn_last_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.add(ledger.open(ref(1), 0), 4)
        ledger.add(ledger.open(ref(2), 0), 5)
    path.write_bytes(path.read_bytes()[: 64 + 400 + 90])
    assert [record.generated for record in read_ledger(path)] == [4]
    with Ledger(path) as ledger:
        ledger.add(ledger.open(ref(3), 0), 6)
    assert 6 in [record.generated for record in read_ledger(path)]


def test_a_ledger_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"counter_file: .*No such file"):
        Ledger(tmp_path / "nowhere" / "ledger")


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("not a ledger at all, but longer than its header would be" * 3)
    with pytest.raises(InvalidRequest, match="no ledger"):
        Ledger(path)
    with pytest.raises(InvalidRequest, match="no ledger"):
        read_ledger(path)
