"""Mirrors that processes share: nobody else gets in, nobody is killed over it, and nothing stays behind."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.transfer import Mirror
from ebbtide.types.weights import Manifest
from ebbtide.weights import FileLayout, places
from tests.unit.transfer.filling import assert_right, blobs_of, bring, content, tasks_to
from tests.unit.weights.chain import Link, chain


@pytest.fixture(scope="module")
def links() -> list[Link]:
    return chain(3, seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirrors"


def killed(work: Callable[[], Any]) -> bool:
    """Whether a child process that does `work` was killed over it, rather than that it came to the end."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001 - told by the status
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in {0, -signal.SIGKILL}
    return os.WIFSIGNALED(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def other(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, run_id="another")


def test_mirrors_of_one_folder_are_one(links: list[Link], folder: Path) -> None:
    one, two = (Mirror(links[0].manifest, folder) for _ in range(2))
    bring(one, links, 1)
    assert_right(two, links[0])
    bring(two, links, 3)
    assert_right(one, links[2])
    one.remember("run", "policy", [3])
    assert two.versions("run", "policy") == [3]
    one.close()
    assert_right(two, links[2])
    assert_right(three := Mirror(links[0].manifest, folder), links[2])
    two.close()
    three.close()
    assert not folder.exists()


def test_runs_do_not_share(links: list[Link], folder: Path) -> None:
    one, two = Mirror(links[0].manifest, folder), Mirror(other(links[0].manifest), folder)
    bring(one, links, 1)
    assert two.held() == {}
    one.close()
    bring(two, links, 2)
    two.close()
    assert not folder.exists()


def test_what_a_killed_process_left_is_used_by_the_next(links: list[Link], folder: Path) -> None:
    def work() -> None:
        mirror = Mirror(links[0].manifest, folder)
        bring(mirror, links, 2)
        die()

    assert killed(work)
    mirror = Mirror(links[0].manifest, folder)
    assert mirror.held() == {}, "nobody watched it"
    mirror.mend()
    assert_right(mirror, links[1])
    mirror.close()
    assert not folder.exists()


def flip(folder: Path, name: str, offset: int) -> None:
    """Change a byte of one of a mirror's files behind everybody's back."""
    (path,) = folder.glob(f"mirror-*/{name}")
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("adopters_killed", [0, 2])
def test_a_byte_that_changed_while_nobody_had_the_mirror_is_found(
    links: list[Link], folder: Path, adopters_killed: int
) -> None:
    def work() -> None:
        bring(Mirror(links[0].manifest, folder), links, 2)
        die()

    def adopt() -> None:
        Mirror(links[0].manifest, folder)
        die()

    assert killed(work)
    flip(folder, "weights", -1)
    for _ in range(adopters_killed):
        assert killed(adopt)
    mirror, other_mirror = (Mirror(links[0].manifest, folder) for _ in range(2))
    assert not mirror.holds(links[1].manifest)
    assert not other_mirror.holds(links[1].manifest)
    mirror.mend()
    wrong = [place for place, digest in mirror.held().items() if digest != digest_of(links[1].manifest, place)]
    assert len(wrong) == 1
    assert len(tasks_to(mirror, links, 2)) == 1, "no more is fetched than what was changed"
    bring(mirror, links, 2)
    assert_right(other_mirror, links[1])
    mirror.close()
    other_mirror.close()


def digest_of(manifest: Manifest, place: tuple[int, int]) -> bytes:
    return manifest.tensors[place[0]].digests[place[1]]


def test_a_mirror_that_somebody_has_is_believed_by_who_joins(links: list[Link], folder: Path) -> None:
    one = Mirror(links[0].manifest, folder)
    bring(one, links, 2)
    two = Mirror(links[0].manifest, folder)
    assert_right(two, links[1])
    one.close()
    three = Mirror(links[0].manifest, folder)
    assert_right(three, links[1])
    two.close()
    three.close()


@pytest.mark.parametrize("dead", [True, False])
def test_a_header_that_was_changed_is_laid_out_anew_for_who_joins(links: list[Link], folder: Path, dead: bool) -> None:
    alive = None if dead else Mirror(links[0].manifest, folder)

    def work() -> None:
        bring(Mirror(links[0].manifest, folder), links, 1)
        die()

    assert killed(work)
    flip(folder, "weights", 3)
    mirror = Mirror(links[0].manifest, folder)
    header = mirror.layout.header
    assert mirror.path.read_bytes()[: len(header)] == header
    mirror.mend()
    assert_right(mirror, links[0])
    mirror.close()
    if alive is not None:
        alive.close()


def test_what_is_in_doubt_is_looked_at_again_header_and_all(links: list[Link], folder: Path) -> None:
    mirror = Mirror(links[0].manifest, folder)
    bring(mirror, links, 2)
    for offset in (3, -1):
        flip(folder, "weights", offset)
    mirror.doubt()
    assert mirror.held() == {}
    mirror.mend()
    assert len(tasks_to(mirror, links, 2)) == 1
    bring(mirror, links, 2)
    header = mirror.layout.header
    assert mirror.path.read_bytes()[: len(header)] == header
    assert_right(mirror, links[1])
    mirror.close()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 60000,
        b'[["r","p"],[1e400]]',
        b'[["r","p"],[-1]]',
        b'[["r","p"],[0]]',
        b'[["r","p"],[4294967296]]',
        b'[["r","p"],[99999999999999999999999]]',
        b'[["r","p"],["1"]]',
        b'[["r","p"],[true]]',
        b'[["r","p"]]',
        b'{"r":1}',
        b"\xff\xfe",
        b"",
    ],
)
def test_a_hint_of_versions_that_is_none_is_ignored(links: list[Link], folder: Path, text: bytes) -> None:
    mirror = Mirror(links[0].manifest, folder)
    (inner,) = folder.iterdir()
    (inner / "versions").write_bytes(text)
    assert mirror.versions("r", "p") == []
    mirror.remember("r", "p", [4, 7])
    assert mirror.versions("r", "p") == [4, 7]
    mirror.close()


def test_what_a_killed_process_left_is_swept_by_whoever_starts_next(links: list[Link], folder: Path) -> None:
    def work() -> None:
        Mirror(links[0].manifest, folder)
        die()

    assert killed(work)
    live = Mirror(other(links[0].manifest), folder)
    assert len(list(folder.iterdir())) == 1
    third = Mirror(msgspec.structs.replace(links[0].manifest, run_id="third"), folder)
    assert len(list(folder.iterdir())) == 2, "what is in use stays"
    live.close()
    third.close()


class Steps:
    """Dies, as a trace function of Python, before the given line of those that write."""

    CODE = (Mirror.apply, Mirror._record, FileLayout.write)

    def __init__(self, line: int) -> None:
        self._left = line
        self._codes = {function.__code__ for function in self.CODE}

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Steps | None":
        if frame.f_code not in self._codes:
            return None
        if event == "line":
            if not self._left:
                die()
            self._left -= 1
        return self


@pytest.mark.parametrize("name", ["brain", "full", "eight"])
def test_a_kill_at_any_line_leaves_each_tile_right_or_unknown(links: list[Link], folder: Path, name: str) -> None:
    tensor = next(at for at, entry in enumerate(links[0].manifest.tensors) if entry.name == name)
    task_places = [place for place in places(links[0].manifest) if place[0] == tensor][:3]
    blobs, line = blobs_of(links), 0
    base = Mirror(links[0].manifest, folder)

    def work() -> None:
        mirror = Mirror(links[0].manifest, folder)
        tasks = tasks_to(mirror, links, 3, task_places)
        sys.settrace(Steps(line))
        for task in tasks:
            mirror.apply(task, blobs)
        sys.settrace(None)

    bring(base, links, 1)
    while killed(work):
        line += 1
        known = base.held()
        assert len(known) >= len(links[0].manifest.tensors[tensor].digests) - 1
        base.mend(list(known))  # look at every tile that is said to be known
        assert base.held().items() >= known.items(), "one was not what was recorded of it"
        bring(base, links, 1)
        assert_right(base, links[0])
    assert line > 20
    base.close()


def test_a_kill_in_the_middle_of_a_tile_is_noticed(
    links: list[Link], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Mirror(links[0].manifest, folder)
    bring(base, links, 1)
    write = FileLayout.write

    def half(layout: FileLayout, file: Any, tensor: int, tile: int, data: Any) -> None:
        old = layout.read(file, tensor, tile).copy()
        write(layout, file, tensor, tile, np.concatenate([data[: len(data) // 2], old[len(data) // 2 :]]))
        die()

    def work() -> None:
        monkeypatch.setattr(FileLayout, "write", half)
        bring(Mirror(links[0].manifest, folder), links, 3)

    assert killed(work)
    assert len(base.held()) == sum(len(entry.digests) for entry in links[0].manifest.tensors) - 1
    base.mend()
    assert not base.holds(links[0].manifest)
    bring(base, links, 3)
    assert_right(base, links[2])
    base.close()


def test_a_kill_while_it_is_laid_out_is_made_good(
    links: list[Link], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["ftruncate", "posix_fallocate", "pwrite", "mkdir", "open"]
    for name in steps:
        for count in range(4):

            def work(name: str = name, count: int = count) -> None:
                real, left = getattr(os, name), count

                def dying(*args: Any, **options: Any) -> Any:
                    nonlocal left
                    if not left:
                        die()
                    left -= 1
                    return real(*args, **options)

                monkeypatch.setattr(os, name, dying)
                Mirror(links[0].manifest, folder)

            killed(work)
            mirror = Mirror(links[0].manifest, folder)
            bring(mirror, links, 2)
            assert_right(mirror, links[1])
            mirror.close()
            assert not folder.exists()


async def test_one_process_holds_it_at_a_time(links: list[Link], folder: Path) -> None:
    mirror = Mirror(links[0].manifest, folder)
    begun, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        own = Mirror(links[0].manifest, folder)
        hold = own.hold()
        with pytest.raises(StopIteration):
            hold.__aenter__().send(None)  # free: taken without waiting
        os.write(begun[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)  # like a kill: the lock ends with the process
    await asyncio.to_thread(os.read, begun[0], 1)

    async def wait() -> None:
        async with mirror.hold():
            pass

    waiting = asyncio.create_task(wait())
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    os.write(go_on[1], b"x")
    await asyncio.wait_for(waiting, 10)
    await asyncio.to_thread(os.waitpid, child, 0)
    mirror.close()


# -- who may -----------------------------------------------------------------------------------------------------


def test_a_folder_that_others_may_enter_is_refused(links: list[Link], folder: Path) -> None:
    folder.mkdir(0o755)
    with pytest.raises(InvalidRequest, match=r"mirror_dir.*755.*mode 700"):
        Mirror(links[0].manifest, folder)


def test_a_folder_of_another_user_is_refused(links: list[Link], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidRequest, match=r"mirror_dir.*belongs to user"):
        Mirror(links[0].manifest, folder)


def test_links_are_not_followed(links: list[Link], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="mirror_dir"):
        Mirror(links[0].manifest, folder)
    folder.unlink()
    mirror = Mirror(links[0].manifest, folder)
    (inner,) = folder.iterdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (folder / "mirror-00000000000000000000000000000000").symlink_to(tmp_path / "elsewhere")
    (inner / "weights").unlink()
    (inner / "weights").symlink_to(precious)
    with pytest.raises((InvalidRequest, OSError)):
        Mirror(links[0].manifest, folder)
    assert precious.read_text() == "precious"
    assert (tmp_path / "elsewhere").exists()
    mirror.close()


def test_what_is_not_a_mirror_is_left_alone(links: list[Link], folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / "letters").mkdir()
    (folder / "letters" / "users").write_text("x")
    (folder / "note").write_text("x")
    Mirror(links[0].manifest, folder).close()
    assert {path.name for path in folder.iterdir()} == {"letters", "note"}
    assert (folder / "letters" / "users").exists()


def test_a_full_memory_is_told_before_anything_is_written(
    links: list[Link], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoCapacity, match=r"mirror_dir: .* has no room for \d+ bytes"):
            Mirror(links[0].manifest, folder)
    assert not folder.exists()
    mirror = Mirror(links[0].manifest, folder)
    assert content(mirror)
    mirror.close()


def test_the_files_are_this_users_alone(links: list[Link], folder: Path) -> None:
    mask = os.umask(0)
    try:
        mirror = Mirror(links[0].manifest, folder)
        mirror.remember("run", "policy", [1])
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
        assert set(modes.values()) == {0o600}
        assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700}
        mirror.close()
    finally:
        os.umask(mask)
