"""What the scripted engine makes of a version's files."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ebbtide.errors import InvalidRequest
from tests.fakes.scripted_engine import ScriptedEngine, digest
from tests.fakes.scripted_settings import ScriptedSettings


def version(path: Path, value: float) -> Path:
    save_file({"a": np.full(5, value, np.float32)}, path)
    return path


async def test_it_says_which_bytes_each_version_consisted_of(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedSettings())
    engine.digests = True
    mirror = tmp_path / "mirror"
    wanted = []
    for number in (1, 2):
        await engine.install(number, version(mirror, number), version(tmp_path / "changes", 0))
        wanted.append((number, digest(version(tmp_path / f"v{number}", number))))
    assert engine.installed == wanted
    assert wanted[0][1] != wanted[1][1]


async def test_it_reads_no_more_than_headers_unless_asked(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedSettings())
    await engine.install(1, version(tmp_path / "v", 1))
    assert engine.installed == []


async def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedSettings())
    torn = tmp_path / "torn"
    torn.write_bytes(b"x")
    with pytest.raises(InvalidRequest):
        await engine.install(1, torn)
    with pytest.raises(InvalidRequest):
        await engine.install(1, version(tmp_path / "v", 1), torn)
    assert engine.boxes is None
