"""Links between the pages lead to a file and a heading that are there, and pages about the code name its files."""

import json
import re
from pathlib import Path
from typing import Final

import msgspec
import pytest

from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.driver.settings import DriverSettings
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import read
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.weight_relay.settings import RelaySettings

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "RESULTS.md"
PAGES: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", RESULTS, *sorted((ROOT / "docs").rglob("*.md"))]
_CODE: Final = re.compile(r"```.*?```", re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_FILE: Final = re.compile(r"[\w/]+\.(?:py|lua|proto)\b")
_MODULE: Final = re.compile(r"[a-z]+(?:_[a-z]+)+")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
SERVICES: Final[dict[str, type[msgspec.Struct]]] = {
    "coordinator": CoordinatorSettings,
    "weight-relay": RelaySettings,
    "gateway": GatewaySettings,
    "trainer": TrainerSettings,
    "driver": DriverSettings,
    "rollout-worker": WorkerSettings,
    "serving-guard": GuardSettings,
}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = _HEADING.findall(_CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_resolves(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}, and there is no such file"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, and there is no such heading"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/development.md"])
def test_every_file_that_a_page_about_the_code_names_is_there(page: str) -> None:
    tops = ("benchmarks", "common", "examples", "lab", "protos", "services", "tests")
    there = {path.as_posix() for top in tops for path in (ROOT / top).rglob("*.*")}
    for name in _FILE.findall((ROOT / page).read_text()):
        assert any(path.endswith(f"/{name}") for path in there), f"{page} names {name}, and there is no such file"


@pytest.mark.parametrize("kind", SERVICES)
def test_the_table_of_services_names_settings_that_they_have(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(rf"^\| `{kind}(?: --[^`]+)?` \|.*$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert len(rows) == (2 if kind == "serving-guard" else 1), "a guard has a row for each owner"
    with pytest.raises(SystemExit):
        read(SERVICES[kind], prog=kind, argv=["--help"], environ={})
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)}
    assert named
    assert not named - known


def unproved(page: Path) -> list[str]:
    """Of the results that a page links those that are missing, or of which the link does not say that the run was a
    quick one, or of code with changes that were not committed.
    """
    found = []
    for row in page.read_text().splitlines():
        for words, name in re.findall(r"\[([^\]]*)\]\((results/[\w-]+\.json)\)", row):
            if not (page.parent / name).exists():
                found.append(name)
                continue
            conditions = json.loads((page.parent / name).read_text())["conditions"]
            marks = {"quick": conditions.get("quick"), "uncommitted": conditions["uncommitted_changes"]}
            if any(true and mark not in words for mark, true in marks.items()):
                found.append(name)
    return found


def test_the_page_of_results_says_of_each_result_whether_it_is_a_quick_one_or_of_uncommitted_code() -> None:
    assert len(re.findall(r"\(results/[\w-]+\.json\)", RESULTS.read_text())) >= 6
    assert not unproved(RESULTS)


def test_a_result_that_is_missing_or_quick_or_of_changed_code_and_not_said_to_be_is_found(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name, conditions in {
        "whole": {"quick": False, "uncommitted_changes": False},
        "quick": {"quick": True, "uncommitted_changes": False},
        "changed": {"uncommitted_changes": True},
    }.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"conditions": conditions}))
    page = tmp_path / "RESULTS.md"
    page.write_text(" ".join(f"[file](results/{name}.json)" for name in ("whole", "quick", "changed", "missing")))
    assert unproved(page) == ["results/quick.json", "results/changed.json", "results/missing.json"]
    page.write_text("[quick](results/quick.json), [uncommitted](results/changed.json)")
    assert not unproved(page)


def test_every_module_on_the_map_is_there() -> None:
    tops = (ROOT / "common", ROOT / "services", ROOT / "lab")
    there = {part for top in tops for path in top.rglob("*.py") for part in path.relative_to(top).with_suffix("").parts}
    code = _CODE.findall((ROOT / "docs" / "architecture.md").read_text())[0]
    assert not set(_MODULE.findall(code)) - there
