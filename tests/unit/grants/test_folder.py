"""Guard and workers share only a private folder."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import check_folder, page_path, socket_path


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "grants"
    check_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    check_folder(folder)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o770, 0o777])
def test_a_folder_that_others_may_enter_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(InvalidRequest, match="mode 700") as refused:
        check_folder(tmp_path)
    assert refused.value.field == "grant_dir"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest):
        check_folder(tmp_path / "file")


def test_a_path_too_long_for_a_socket_is_refused_before_anything_boots(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    with pytest.raises(InvalidRequest, match="shorter"):
        check_folder(folder, field="here")
    assert not folder.exists()


def test_each_worker_has_a_page_beside_the_socket(tmp_path: Path) -> None:
    assert page_path(tmp_path, "w1").parent == socket_path(tmp_path).parent == tmp_path
    assert page_path(tmp_path, "w1") != page_path(tmp_path, "w2")
