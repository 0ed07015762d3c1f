"""A run's spec in a file: everything that is wrong in it is told, with line and column."""

import os
import threading
from pathlib import Path

import pytest

from ebbtide.checked_files import MOST_PROBLEMS, FileRefused
from ebbtide.client.client import read_spec
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import EvaluationSpec, RunSpec, SlotPriority
from ebbtide.types.spec_file import SpecFile
from ebbtide.v1 import types_pb2
from ebbtide.wire import from_proto

GOOD = """\
name = "mine"
model = "m"
[environment]
name = "spell"
params = { sizes = [1, 2] }
"""


def problems(folder: Path, text: str) -> list[str]:
    file = folder / "RUN.toml"
    file.write_text(text)
    with pytest.raises(FileRefused) as refused:
        read_spec(file)
    return [str(one).removeprefix(f"{file}:") for one in refused.value.problems]


def test_a_good_file_is_the_spec_that_a_mapping_is(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(GOOD)
    environment = {"name": "spell", "params": {"sizes": [1, 2]}}
    assert read_spec(tmp_path / "RUN.toml") == read_spec({"name": "mine", "model": "m", "environment": environment})


def test_what_bounds_cannot_express_is_told_beside_it_except_of_tables_with_a_slip(tmp_path: Path) -> None:
    text = f"{GOOD}[sampling]\nmax_tokns = 900\nmin_tokens = 600\n[share]\nfloor = 0.5\nceiling = 0.4\n"
    assert problems(tmp_path, text) == [
        "7:1: sampling.max_tokns: is unknown; did you mean max_tokens?",
        "10:9: share.floor: must be at most share.ceiling (0.4)",
    ]


def test_a_priority_is_one_of_three_words_and_a_file_has_no_former_one(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(f'{GOOD}[evaluation]\npriority = "background"\n')
    assert read_spec(tmp_path / "RUN.toml").evaluation.priority is SlotPriority.BACKGROUND
    words = "it must be one of before, shared, background"
    assert problems(tmp_path, f'{GOOD}[evaluation]\npriority = "backgruond"\n[requests]\npriority = "behind"\n') == [
        f"7:12: evaluation.priority: is 'backgruond'; {words}; did you mean background?",
        f"9:12: requests.priority: is 'behind'; {words}",
    ]


@pytest.mark.parametrize(("former", "now"), [("beside", SlotPriority.SHARED), ("behind", SlotPriority.BACKGROUND)])
def test_a_stored_spec_with_a_former_word_is_still_read(former: str, now: SlotPriority) -> None:
    stored = types_pb2.EvaluationSpec(problems=3, priority=former)
    assert from_proto(stored, EvaluationSpec) == EvaluationSpec(problems=3, priority=now)


def test_several_faults_of_one_table_are_told(tmp_path: Path) -> None:
    text = f"{GOOD}[sampling]\nseed = 1\npresence_penalty = 0.5\nstop = ['', 'x']\n"
    assert [one.partition(": ")[0] for one in problems(tmp_path, text)] == ["7:8", "8:20", "9:8"]


def test_what_is_missing_is_told_at_the_table_that_lacks_it(tmp_path: Path) -> None:
    assert problems(tmp_path, 'name = "mine"\n[environment]\nparams = {}\n') == [
        "1:1: model: is missing; add it, a text in quotes",
        "2:1: environment.name: is missing; add it, a text in quotes",
    ]


def test_what_a_later_check_finds_is_told_at_the_value_of_its_field(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text(GOOD)
    file = SpecFile(tmp_path / "RUN.toml")
    file.note(InvalidRequest("is too large", field="environment.params.sizes[1]"))
    file.note(InvalidRequest("is not known", field="environment"))
    with pytest.raises(FileRefused) as refused:
        file.refuse_noted()
    places = [(one.line, one.column, one.text) for one in refused.value.problems]
    assert places == [(3, 1, "is not known"), (5, 24, "is too large")]


def test_no_more_than_a_screenful_is_told(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "".join(f"key{number} = 1\n" for number in range(50)))) == MOST_PROBLEMS


def test_a_spec_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    writing = threading.Thread(target=lambda: pipe.write_text(GOOD))
    writing.start()
    assert isinstance(read_spec(pipe), RunSpec)
    writing.join()
