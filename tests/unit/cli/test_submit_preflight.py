"""What is told of a spec's deeper check, which runs in a process of its own."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.checked_files import FileRefused
from ebbtide.cli.submit_preflight import check

SPEC = 'name = "mine"\nmodel = "."\n[environment]\nname = "spell"\n[sampling]\nmax_tokens = 900\n'


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "RUN.toml").write_text(SPEC)
    return tmp_path / "RUN.toml"


def test_what_the_trainer_refuses_is_told_at_its_place_in_the_file(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        answer = {"field": "sampling.max_tokens", "message": "does not fit"}
        return subprocess.CompletedProcess(command, 2, stdout=json.dumps(answer), stderr="")

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(FileRefused, match=r"RUN\.toml:6:14: sampling\.max_tokens: does not fit$"):
        check(spec)


def test_an_environment_that_takes_long_is_named(
    spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        time.sleep(2.5)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr("subprocess.run", run)
    assert check(spec).model == str(Path.cwd())
    told = capsys.readouterr().err
    assert told.startswith("ebbtide: waiting for the check of the model and of the environment 'spell' since ")
