"""A guard's next life knows the newest lease of each run."""

from pathlib import Path

import pytest

from ebbtide.errors import Superseded
from ebbtide.serving_guard.device_ownership import DeviceOwnership, OwnerLease
from ebbtide.serving_guard.lender import LeaseRecord

OLD, NEW = OwnerLease("r", 1, "a"), OwnerLease("r", 2, "b")


def ownership(remembered: tuple[OwnerLease, ...] = ()) -> DeviceOwnership:
    return DeviceOwnership(0.0, settle_s=5.0, silent_s=15.0, rejoin_s=1.0, remembered=remembered)


def test_an_older_trainer_is_refused_though_it_comes_first_to_a_new_guard(tmp_path: Path) -> None:
    first = ownership()
    first.claim(1.0, NEW, lends=False)
    LeaseRecord(tmp_path).write(first.newest())
    second = ownership(LeaseRecord(tmp_path).read())
    with pytest.raises(Superseded, match="newer lease"):
        second.claim(1.0, OLD, lends=True)
    assert not second.lends(1.0)
    second.claim(2.0, NEW, lends=False)
    assert second.state(2.0) == "held"


def test_a_host_that_was_started_anew_has_no_older_trainers(tmp_path: Path) -> None:
    record = LeaseRecord(tmp_path)
    record.write([NEW])
    file = tmp_path / "leases.json"
    file.write_text(file.read_text().replace(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "before"))
    assert LeaseRecord(tmp_path).read() == ()


@pytest.mark.parametrize("content", [b"", b"{", b'{"leases": 3}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leases.json").write_bytes(content)
    assert LeaseRecord(tmp_path).read() == ()


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    record = LeaseRecord(tmp_path / "gone")
    record.write([NEW])
    assert record.read() == ()
