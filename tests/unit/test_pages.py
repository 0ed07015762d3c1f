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
    tops = ("benchmarks", "common", "examples", "protos", "services", "tests")
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
    """Of the results that a page names those that are missing, of a quick run, or of code that nobody can look up."""
    named = re.findall(r"`(results/[\w-]+\.json)`", page.read_text())
    return [name for name in named if not _of_whole_run(page.parent / name)]


def _of_whole_run(path: Path) -> bool:
    conditions = json.loads(path.read_text())["conditions"] if path.exists() else {"quick": True}
    return not conditions.get("quick") and not conditions["uncommitted_changes"]


def test_every_result_that_the_page_of_results_names_is_of_a_whole_run_of_committed_code() -> None:
    assert not unproved(RESULTS)


def test_a_result_that_is_missing_or_quick_or_of_changed_code_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name, conditions in {
        "whole": {"quick": False, "uncommitted_changes": False},
        "quick": {"quick": True, "uncommitted_changes": False},
        "changed": {"uncommitted_changes": True},
    }.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"conditions": conditions}))
    page = tmp_path / "RESULTS.md"
    page.write_text(" ".join(f"`results/{name}.json`" for name in ("whole", "quick", "changed", "missing")))
    assert unproved(page) == ["results/quick.json", "results/changed.json", "results/missing.json"]


def test_every_module_on_the_map_is_there() -> None:
    tops = (ROOT / "common", ROOT / "services")
    there = {part for top in tops for path in top.rglob("*.py") for part in path.relative_to(top).with_suffix("").parts}
    code = _CODE.findall((ROOT / "docs" / "architecture.md").read_text())[0]
    assert not set(_MODULE.findall(code)) - there
