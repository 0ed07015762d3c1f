"""The pages of docs/reference/ that the code defines are as `make docs` writes them now."""

import inspect
import re
from pathlib import Path

import pytest

from ebbtide.reference.__main__ import FOLDER, PAGES, text
from ebbtide.reference.registered_metrics import registered
from ebbtide.reference.sdk import CLASSES, calls
from tests.unit.simulator.scenario.scenario_texts import problems

#: Words of other pages that begin as metrics do.
OTHERS = {"relay_gbps", "trainer_price_per_hour", "worker_id"}


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_the_one_that_the_code_defines(name: str) -> None:
    assert (FOLDER / name).read_text() == text(name), f"docs/reference/{name} is out of date: run `make docs`"


def test_the_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = text("cli.md")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("EBBTIDE_COORDINATOR", "somewhere:7600")
    assert text("cli.md") == usual


def test_the_page_about_the_sdk_describes_every_call_and_says_how_it_is_used() -> None:
    page = text("sdk.md")
    for owner in CLASSES:
        for name, call in calls(owner).items():
            assert inspect.getdoc(call), f"{owner.__name__}.{name} has no docstring, which the page would show"
            assert re.search(rf"`(?:await |async for |async with )?{name}[(`]", page)
    assert "| `await submit(spec, run_id=None)` |" in page
    assert "| `async for watch(run_id, cursor='')` |" in page
    assert "| `async with claim(run_id=None, role='trainer', *, holder='', wait=True)` |" in page
    assert "| `publisher(exchange=None)` |" in page


def test_the_example_on_the_page_about_scenarios_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", text("scenarios.md"), re.DOTALL)
    assert not problems(example, tmp_path / "s.toml")


def test_pages_that_name_metrics_name_real_ones() -> None:
    known = {name.removeprefix("ebbtide_") for name in registered()} | OTHERS
    for page in sorted(FOLDER.parent.rglob("*.md")):
        named = re.findall(
            r"`(?:ebbtide_)?((?:coordinator|relay|worker|guard|gateway|trainer|driver|rpc)_\w+)(?:\{\w+\})?`",
            page.read_text(),
        )
        assert not set(named) - known, f"{page} names {sorted(set(named) - known)}, which no program registers"
