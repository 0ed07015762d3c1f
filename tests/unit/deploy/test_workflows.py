"""What GitHub's workflows do are scripts of .ci/, which run anywhere; the site's links lead somewhere."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[3]
WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_of_a_workflow_is_a_script_or_an_action_of_a_stated_version(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = [step["run"] for step in steps if "run" in step]
    assert scripts
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), f"{script} is no program of the repository"
        assert script.startswith(".ci/")
    for action in (step["uses"] for step in steps if "uses" in step):
        assert re.fullmatch(r"[\w-]+/[\w-]+@(?:v\d+|release/v1)", action)


def test_the_tests_may_isolate_environments_where_ubuntu_forbids_users_namespaces() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]["tests"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/namespaces", ".ci/run"]


def test_the_tools_of_site_and_release_are_pinned() -> None:
    for name in ("site", "release"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert all(re.fullmatch(r"#.*|[\w-]+==[\w.]+", line) for line in text.splitlines())
        assert f"requirements/{name}.txt" in (ROOT / ".ci" / ("wheels" if name == "release" else name)).read_text()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hooks of the site, without mkdocs."""
    names = {
        "mkdocs.config.defaults": {"MkDocsConfig": object},
        "mkdocs.structure.files": {"File": object, "Files": object},
        "mkdocs.structure.pages": {"Page": object},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "deploy" / "site" / "links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(links: ModuleType, text: str, page: str, repository: str | None) -> str:
    where: Any = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    found: str = links.on_page_markdown(text, page=where, config=SimpleNamespace(repo_url=repository), files=None)
    return found


def test_links_out_of_the_documentation_lead_into_the_repository_or_are_plain_text(links: ModuleType) -> None:
    text = "[a](training.md#x), [b](../../examples/b.py#L3), [c](https://d.e/f), [g](../reference/)"
    assert shown(links, text, "guides/own.md", "https://h/r") == (
        "[a](training.md#x), [b](https://h/r/blob/main/examples/b.py#L3), [c](https://d.e/f), "
        "[g](https://h/r/blob/main/docs/reference)"
    )
    assert shown(links, "[b](../../examples/b.py)", "guides/own.md", None) == "b"
    assert shown(links, "[status](../../README.md#status)", "guides/own.md", None) == "[status](../index.md#status)"
    assert shown(links, "```\n[b](../../b.py)\n```", "guides/own.md", "https://h/r") == "```\n[b](../../b.py)\n```"


def test_the_readme_as_first_page_links_pages_and_files(links: ModuleType) -> None:
    text = links._relocated("[i](docs/start/install.md) ![p](docs/p.png) [l](LICENSE) [s](#status)", "", "docs")
    assert text == "[i](start/install.md) ![p](p.png) [l](../LICENSE) [s](#status)"
    assert shown(links, text, "index.md", "https://h/r") == (
        "[i](start/install.md) ![p](p.png) [l](https://h/r/blob/main/LICENSE) [s](#status)"
    )
