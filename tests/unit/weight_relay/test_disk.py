"""The relay's directory, taken or refused."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.weight_relay.disk import Disk


def test_a_directory_that_cannot_be_written_is_refused_by_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^data_dir: .*file cannot be written"):
        Disk(tmp_path / "file")
