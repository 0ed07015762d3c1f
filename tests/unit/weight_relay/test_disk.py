"""The relay's directory, taken or refused."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.weight_relay.disk import FORMAT, Disk
from ebbtide.weight_relay.service import Relay
from ebbtide.weight_relay.settings import RelaySettings


def test_a_directory_that_cannot_be_written_is_refused_by_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^data_dir: .*file cannot be written"):
        Disk(tmp_path / "file")


async def test_a_directory_of_another_format_is_refused_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    relay = Relay(RelaySettings(data_dir=str(tmp_path)))
    await relay.close()
    assert (tmp_path / "format").read_text() == f"{FORMAT}\n"
    later = tmp_path / "versions" / "run" / "p" / "0000000001.manifest"
    later.parent.mkdir(parents=True)
    later.write_bytes(b"what this relay takes for junk")
    (tmp_path / "format").write_text(f"{FORMAT + 1}\n")
    with pytest.raises(
        InvalidRequest, match=rf"^data_dir: .* has format '{FORMAT + 1}', and this relay knows {FORMAT} alone"
    ):
        Disk(tmp_path)
    assert later.exists()


async def test_a_directory_of_0_1_0_which_has_no_mark_is_taken_and_marked(tmp_path: Path) -> None:
    for name in ("tiles", "versions", "staging", "arriving", "keys"):
        (tmp_path / name).mkdir()
    relay = Relay(RelaySettings(data_dir=str(tmp_path)))
    await relay.open()
    await relay.close()
    assert (tmp_path / "format").read_text() == "1\n"


async def test_what_lies_in_the_way_of_a_start_is_named(tmp_path: Path) -> None:
    relay = Relay(RelaySettings(data_dir=str(tmp_path)))
    (tmp_path / "tiles" / "folder").mkdir()
    with pytest.raises(InvalidRequest, match=r"^data_dir: .*/tiles/folder cannot be read or deleted"):
        await relay.open()
    await relay.close()


async def test_damaged_versions_and_strange_files_do_not_keep_a_relay_from_starting(tmp_path: Path) -> None:
    relay = Relay(RelaySettings(data_dir=str(tmp_path)))
    (tmp_path / "versions" / "run" / "p").mkdir(parents=True)
    for name, content in (("0000000001", b"junk"), ("0000000002", b""), ("0000000003", bytes(4096))):
        (tmp_path / "versions" / "run" / "p" / f"{name}.manifest").write_bytes(content)
    (tmp_path / "tiles" / "stray").write_bytes(b"")
    await relay.open()
    assert not list(relay.index.committed())
    assert not list((tmp_path / "tiles").iterdir())
    await relay.close()
