"""What mirrors take of memory and descriptors is given back, and where there is none nobody dies of it."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import NoCapacity
from ebbtide.transfer import ElementChanges, Mirror
from tests.unit.transfer.filling import assert_right, bring
from tests.unit.weights.chain import Link, chain


@pytest.fixture(scope="module")
def links() -> list[Link]:
    return chain(3, seed=5)


@pytest.fixture(params=["private", "shared"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "mirrors" if request.param == "shared" else None


def descriptors() -> list[str]:
    """What this process has open, by kind, removed files too."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:
            continue  # that of the listing itself
    return sorted(found)


def no_room(*_: Any, **__: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond it fail, as they do where memory is full (EFBIG: Python ignores the signal)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def kept(mirror: Mirror, links: list[Link], number: int) -> bool:
    """Bring the mirror to a version, and keep what changes with it."""
    changes = ElementChanges(links[0].manifest, share=1.0)
    bring(mirror, links, number, changes)
    return mirror.keep_changes(bytes(32), bytes([number]) * 32, changes)


def test_kept_changes_leave_no_descriptor_and_no_memory_behind(links: list[Link], folder: Path | None) -> None:
    mirror = Mirror(links[0].manifest, folder)
    assert kept(mirror, links, 2)
    mirror.remember("run", "policy", [2])
    assert mirror.changes(bytes(32), b"\2" * 32) is not None
    before = descriptors()
    for number in (3, 2, 3, 2):
        assert kept(mirror, links, number)
        mirror.remember("run", "policy", [number])
        assert mirror.changes(bytes(32), bytes([number]) * 32) is not None
    assert len(descriptors()) == len(before)
    mirror.close()


def test_changes_for_which_there_is_no_room_are_not_kept(links: list[Link], folder: Path | None) -> None:
    mirror = Mirror(links[0].manifest, folder)
    assert kept(mirror, links, 2)
    before = descriptors()
    with files_of_at_most(100):
        assert not kept(mirror, links, 3)
    assert descriptors() == before
    assert mirror.changes(bytes(32), b"\2" * 32) is not None, "those kept before stay"
    assert_right(mirror, links[2])
    mirror.close()


def test_changes_whose_file_cannot_be_made_are_not_kept(
    links: list[Link], folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(links[0].manifest, folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open" if folder else "memfd_create", no_room)
        assert not kept(mirror, links, 2)
    assert kept(mirror, links, 3)
    mirror.close()


def test_a_full_memory_only_costs_the_hint_where_tiles_are_from(links: list[Link], folder: Path | None) -> None:
    mirror = Mirror(links[0].manifest, folder)
    mirror.remember("run", "policy", [1])
    before = descriptors()
    with files_of_at_most(4):
        mirror.remember("run", "policy", [1, 2])
    assert mirror.versions("run", "policy") == [1]
    assert descriptors() == before
    mirror.remember("run", "policy", [1, 2])
    assert mirror.versions("run", "policy") == [1, 2]
    mirror.close()


@pytest.mark.parametrize(
    ("call", "shared"),
    [(call, shared) for call in ("ftruncate", "pwrite") for shared in (False, True)]
    + [("memfd_create", False), ("mkdir", True), ("open", True)],
)
def test_a_mirror_for_which_there_is_no_room_says_so_and_leaves_nothing(
    links: list[Link], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, shared: bool
) -> None:
    folder = tmp_path / "mirrors" if shared else None
    real = getattr(os, call)

    def full(where: Any, *rest: Any, **options: Any) -> Any:
        if call != "open" or where == "weights":
            no_room()
        return real(where, *rest, **options)

    before = descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(NoCapacity):
            Mirror(links[0].manifest, folder)
    assert descriptors() == before
    mirror = Mirror(links[0].manifest, folder)
    bring(mirror, links, 2)
    assert_right(mirror, links[1])
    mirror.close()


def test_what_was_written_before_the_machine_started_anew_is_not_believed(
    links: list[Link], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, folder = tmp_path / "boot_id", tmp_path / "mirrors"
    boot.write_text("one")
    monkeypatch.setattr("ebbtide.transfer.mirror._BOOT", boot)

    def leave_behind() -> None:
        if child := os.fork():
            os.waitpid(child, 0)
            return
        bring(Mirror(links[0].manifest, folder), links, 2)
        os._exit(0)  # before anything is removed

    leave_behind()
    same = Mirror(links[0].manifest, folder)
    same.mend()
    assert_right(same, links[1])
    same.close()
    leave_behind()
    boot.write_text("two")
    after = Mirror(links[0].manifest, folder)
    after.mend()
    assert after.held() == {}
    assert len(list(folder.iterdir())) == 1, "the old one goes"
    after.close()
