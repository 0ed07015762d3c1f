"""The relay's directory, taken or refused."""

import shutil
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.weight_relay.library.relay_disk import FORMAT, RelayDisk
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import tile_sizes
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, keyframes, publish, relay_at


def test_a_directory_that_cannot_be_written_is_refused_by_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^data_dir: .*file cannot be written"):
        RelayDisk(tmp_path / "file")


async def test_a_directory_of_another_format_is_refused_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path)))
    await relay.close()
    assert (tmp_path / "format").read_text() == f"{FORMAT}\n"
    later = tmp_path / "versions" / "run" / "p" / "0000000001.manifest"
    later.parent.mkdir(parents=True)
    later.write_bytes(b"what this relay takes for junk")
    (tmp_path / "format").write_text(f"{FORMAT + 1}\n")
    with pytest.raises(
        InvalidRequest, match=rf"^data_dir: .* has format '{FORMAT + 1}', and this relay knows {FORMAT} alone"
    ):
        RelayDisk(tmp_path)
    assert later.exists()


async def test_a_directory_of_0_1_0_which_has_no_mark_is_taken_and_marked(tmp_path: Path) -> None:
    for name in ("tiles", "versions", "staging", "arriving", "keys"):
        (tmp_path / name).mkdir()
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path)))
    await relay.open()
    await relay.close()
    assert (tmp_path / "format").read_text() == "1\n"


async def test_what_lies_in_the_way_of_a_start_is_named(tmp_path: Path) -> None:
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path)))
    (tmp_path / "tiles" / "folder").mkdir()
    with pytest.raises(InvalidRequest, match=r"^data_dir: .*/tiles/folder cannot be read or deleted"):
        await relay.open()
    await relay.close()


async def test_damaged_versions_and_strange_files_do_not_keep_a_relay_from_starting(tmp_path: Path) -> None:
    relay = WeightRelay(RelaySettings(data_dir=str(tmp_path)))
    (tmp_path / "versions" / "run" / "p").mkdir(parents=True)
    for name, content in (("0000000001", b"junk"), ("0000000002", b""), ("0000000003", bytes(4096))):
        (tmp_path / "versions" / "run" / "p" / f"{name}.manifest").write_bytes(content)
    (tmp_path / "tiles" / "stray").write_bytes(b"")
    await relay.open()
    assert not list(relay.library.index.committed())
    assert not list((tmp_path / "tiles").iterdir())
    await relay.close()


async def test_a_copy_made_while_versions_come_and_go_has_all_that_is_whole_in_it(tmp_path: Path) -> None:
    """As docs/deploy/redis.md has it: what names tiles is copied before the tiles."""
    relay, line, copy = (
        relay_at(tmp_path / "data", keep_versions=2, keyframe_every=2),
        Line(7, sizes=SMALL),
        tmp_path / "copy",
    )
    await relay.open()
    for version in list(line)[:5]:
        await publish(relay, version)
    await wait_until(lambda: keyframes(relay)[-1:] == [5], what="a keyframe")
    for name in ("keys", "versions"):
        shutil.copytree(tmp_path / "data" / name, copy / name)
    shutil.copy(tmp_path / "data" / "format", copy)
    copied = held(relay)
    for version in list(line)[5:]:
        await publish(relay, version)
    shutil.copytree(tmp_path / "data" / "tiles", copy / "tiles")
    assert set(copied) - set(held(relay))  # some went meanwhile, with their tiles
    await relay.close()

    restored = relay_at(copy, keep_versions=2)
    await restored.open()
    assert 5 in held(restored)
    assert set(held(restored)) <= set(copied)
    for number in held(restored):
        manifest = restored.reader.manifest("run", "policy", number)
        if number in keyframes(restored):
            for digest, size in tile_sizes(manifest).items():
                assert len(await restored.reader.tile(digest)) == size
    await publish(restored, line[6])  # and goes on
    assert 6 in held(restored)
    await restored.close()
