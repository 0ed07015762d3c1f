"""Links between the pages lead to a file and a heading that are there, and paths that pages name begin at the root."""

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
#: Those that people write, and that speak of the present code alone.
WRITTEN: Final = [page for page in PAGES if page != RESULTS and page.parent.name != "reference"]
CONCEPTS: Final = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "concepts").glob("*.md"))
_CODE: Final = re.compile(r"```.*?```", re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_INLINE: Final = re.compile(r"`([^`\n]+)`")
_PATH: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
#: How a path begins, by a folder at the root that no build and no run writes.
_OURS: Final = re.compile(r"(?:benchmarks|common|deploy|docs|examples|lab|protos|requirements|services|tests)/")
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


def lost_paths(text: str, *, about_code: bool) -> list[str]:
    """The words in backticks that are paths of the repository and are not there. A page about the code names modules
    and folders by their whole path from the root, since a reader cannot find `rules/` otherwise; `runs/` is output.
    """
    words = [word.partition("::")[0] for inline in _INLINE.findall(_CODE.sub("", text)) for word in inline.split()]
    return [
        word
        for word in words
        if _PATH.fullmatch(word)
        and (
            _OURS.match(word)
            or (about_code and word.endswith((".py", ".lua", ".proto", "/")) and not word.startswith("runs/"))
        )
        and not (ROOT / word).exists()
    ]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    about_code = str(page.relative_to(ROOT)) in {"CONTRIBUTING.md", "docs/development.md", *CONCEPTS}
    assert not lost_paths(page.read_text(), about_code=about_code)


def test_a_path_that_is_gone_or_does_not_begin_at_the_root_is_noticed() -> None:
    text = "`tests/unit/test_pages.py::test_x`, `tests/gone.py`, `rules/`, `make -C common/nowhere`, `runs/up/`, `docs`"
    assert lost_paths(text, about_code=False) == ["tests/gone.py", "common/nowhere"]
    assert lost_paths(text, about_code=True) == ["tests/gone.py", "rules/", "common/nowhere"]


@pytest.mark.parametrize("kind", SERVICES)
def test_the_table_of_services_names_settings_that_they_have(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/deploy/operations.md").read_text()
    rows = re.findall(rf"^\| `{kind}(?: --[^`]+)?` \|.*$", page, re.MULTILINE)
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


def test_the_map_names_every_room_and_no_other() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    (code,) = [block for block in _CODE.findall(page) if "common/ebbtide/" in block]
    places = dict(
        re.findall(r"^(common|services|lab)/ebbtide/(.*?)(?=^\w+/ebbtide/|\Z)", code, re.MULTILINE | re.DOTALL)
    )
    for top in ("common", "services", "lab"):
        there = {folder.name for folder in (ROOT / top / "ebbtide").iterdir() if (folder / "__init__.py").exists()}
        left = {name for line in places[top].splitlines() for name in re.findall(r"^  (\w+/(?:  \w+/)*) ", line)}
        named = {name for names in left for name in re.findall(r"\w+", names)}
        assert named == there - {"v1"}, f"{top}/ebbtide has other rooms than the map in docs/concepts/architecture.md"


def test_the_rooms_inside_a_program_that_the_map_names_are_there() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    (code,) = [block for block in _CODE.findall(page) if "common/ebbtide/" in block]
    for room, words in re.findall(r"^  (\w+)/ +(.*)$", code, re.MULTILINE):
        (folder,) = [
            ROOT / top / "ebbtide" / room
            for top in ("common", "services", "lab")
            if (ROOT / top / "ebbtide" / room).is_dir()
        ]
        for inner in re.findall(r"(?<![\w/])(\w+)/(?!\w)", words):
            beside = folder.parent / inner
            assert (folder / inner).is_dir() or beside.is_dir(), (
                f"the map names {room}/{inner}, and there is no such room"
            )
