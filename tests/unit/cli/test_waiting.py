"""What a command says on stderr while it waits."""

import re
import time

import pytest

from ebbtide.cli.waiting import Waiting


def test_a_short_wait_is_not_worth_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("the store", first_s=30.0):
        pass
    assert capsys.readouterr().err == ""


def test_a_long_wait_is_told_with_its_begin_and_again_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    parts = iter(["one part", "the other part"])
    with Waiting(lambda: next(parts, "the rest"), first_s=0.05, every_s=0.05):
        time.sleep(0.6)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"ebbtide: waiting for one part since \d\d:\d\d:\d\d, 0 s", first)
    assert second.startswith("ebbtide: waiting for the other part since ")


def test_of_waits_inside_each_other_the_inner_one_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("the outer", first_s=1.0):
        with Waiting("the inner", first_s=1.0):
            time.sleep(1.5)
        time.sleep(0.3)
    assert [line.split(" since ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "ebbtide: waiting for the inner"
    ]


def test_what_shows_something_now_and_then_is_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("news", first_s=30.0) as waiting:
        waiting._began -= 29.9
        waiting.heard()
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
