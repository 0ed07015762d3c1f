"""The examples of README, start and guides are valid, and their tables name what the code has."""

import ast
import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest

from ebbtide.client import Client, Lease
from ebbtide.client.client import read_spec
from ebbtide.environments import checked_result, load_source
from ebbtide.environments.session_verifiers import Passage, PlayedBranch, VerifiedSession, load_verifier
from ebbtide.trainer.learning.grpo import StepStats
from ebbtide.types.rollout import DropReason, Trajectory

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
#: Those that people write.
WRITTEN: Final = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.parent.name != "reference"
]
REFERENCE: Final = ROOT / "docs" / "reference" / "cli.md"
ENVIRONMENTS: Final = "docs/guides/environments-and-data.md"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def rows(page: str, heading: str) -> list[list[str]]:
    """The names in the first column of each row of a section's tables."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in re.findall(r"^\| (`.*)$", section, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_can_be_parsed_and_calls_what_client_and_lease_have(page: Path) -> None:
    for code in blocks(str(page.relative_to(ROOT)), "python"):
        for node in ast.walk(compile(code, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"client": Client, "lease": Lease}.get(node.value.id) if "Client() as client" in code else None
                assert owner is None or hasattr(owner, node.attr), f"{node.value.id} has no {node.attr}"


def flags_of_commands() -> dict[str, set[str]]:
    """The flags of each command in the reference, with those of programs by their settings."""
    sections: dict[str, set[str]] = {}
    for heading, text in re.findall(
        r"^###? ([^\n]+)\n(.*?)(?=^###? |\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL
    ):
        flags = set(re.findall(r"--[a-z][a-z-]*", "".join(re.findall(r"^\| (.+?) \|", text, re.MULTILINE))))
        flags |= {"*"} if "Its flags are [settings]" in text else set()
        flags |= {f"--no-{flag[2:]}" for flag in re.findall(r"--[a-z-]+", text) if f"--no-{flag[2:]}" in text}
        sections[heading] = flags
    commands = {}
    for heading, flags in sections.items():
        if found := re.fullmatch(r"`(ebbtide [a-z -]+?)(?: [A-Z\[].*)?`", heading):
            program = found[1].removeprefix("ebbtide ").removeprefix("serve ").replace(" ", "-")
            settings = sections.get(program, set()) | sections["Every program"] if "*" in flags else set()
            commands[found[1]] = flags | settings
    return commands


def calls_on(page: Path) -> list[list[str]]:
    """The words of each call of `ebbtide` on a page, in a code block or in backticks; of a pipeline, up to its end."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    calls = []
    for line in (*lines, *inline):
        command = line.partition(" #")[0]
        if found := "──" not in line and re.search(r"(?:^|[ /(\"])(?:ebbtide|--rm cli) ([a-z].*)", command):
            calls.append(re.split(r"[;|>]", found[1])[0].split())
    return calls


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_the_commands_of_a_page_and_their_flags_are_those_of_the_reference(page: Path) -> None:
    known = flags_of_commands()
    for words in calls_on(page):
        names = [" ".join(["ebbtide", *words[:length]]) for length in (2, 1)]
        command = next((name for name in names if name in known), "")
        assert command or any(other.startswith(f"{names[1]} ") for other in known), f"there is no {' '.join(words)}"
        for flag in (word.partition("=")[0] for word in words if command and re.match(r"--[a-z]", word)):
            prefixes = ("--server-", "--client-", "--security-")  # of connections
            assert flag in known[command] | {"--help", "--config"} or flag.startswith(prefixes), (
                f"{command} has no {flag}"
            )


def test_the_pages_call_many_commands() -> None:
    called = {" ".join(words[:2]) for page in WRITTEN for words in calls_on(page)}
    assert {"run submit", "serve gateway", "tokens issue", "certs hosts"} <= called
    assert len(called) >= 30


def test_the_run_of_the_quickstart_is_a_run() -> None:
    (text,) = blocks("docs/start/quickstart.md", "toml")
    spec = read_spec(tomllib.loads(text))
    assert load_source(spec.environment.name, spec.environment.params, spec.seed).make("eval", 0).reset()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The modules of the page, where they can be imported from."""
    modules = {code.split(".py")[0].removeprefix("# "): code for code in blocks(ENVIRONMENTS, "python")}
    assert modules.keys() == {"scores", "sums", "checks"}
    for name, code in modules.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_data_of_the_page_makes_an_environment_and_so_does_its_reward_function(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1:,}"} for n in range(990, 1090)]
    (written / "gsm8k.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    monkeypatch.chdir(written)
    environment = tomllib.loads(blocks(ENVIRONMENTS, "toml")[0])["environment"]
    source = load_source(environment["name"], environment["params"], 0)
    episode: Any = source.make("eval", 3)
    (message,) = episode.reset()
    right = str(int(re.findall(r"\d+", message.content)[0]) + 1)
    assert message.content.endswith("\nEnd with the number alone.")
    assert checked_result(episode.step(f"It is {right}.")).reward == 1.0
    assert checked_result(episode.step("It is 7.")).reward == 0.0
    named = {**environment["params"], "reward": "scores:close"}
    close = load_source("dataset", named, 0).make("eval", 3)
    assert 0.0 < (checked_result(close.step("One more.")).reward or 0.0) < 1.0


def test_the_parameters_and_rewards_of_data_sets_are_those_of_the_code() -> None:
    from ebbtide.environments.dataset import DatasetParams
    from ebbtide.environments.rewards import READY

    named = {name for row in rows(ENVIRONMENTS, "Your data") for name in row}
    assert READY.keys() | set(DatasetParams.__struct_fields__) <= named
    parameters = {name for kind in READY.values() for name in kind.__struct_fields__}
    assert not {name for name in parameters if f"`{name}`" not in (ROOT / ENVIRONMENTS).read_text()}


def test_the_environment_of_several_turns_asks_once_more(written: Path) -> None:
    environment = load_source("sums:Sums", {"most": 9}, 0).make("train", 3)
    (message,) = environment.reset()
    left, right = map(int, re.findall(r"\d+", message.content))
    wrong = checked_result(environment.step("none"))
    assert wrong.messages
    assert not wrong.done
    late = checked_result(environment.step(str(left + right)))
    assert (late.done, late.reward) == (True, 0.5)


def test_the_verifier_judges_a_session(written: Path) -> None:
    branch = PlayedBranch((Passage("2 + 2?", sampled=False), Passage(" 4\n", sampled=True)))
    assert load_verifier("checks:exact")(VerifiedSession((branch,), {"answer": "4"})) == 1.0


def test_the_values_of_a_step_are_those_of_the_trainer() -> None:
    from ebbtide.trainer.learning.training_batches import summary
    from ebbtide.trainer.tracking import STEP_FIGURES

    shown = {name for row in rows("docs/reference/tracked-figures.md", "Of each step") for name in row}
    names = {figure.source for figure in STEP_FIGURES if figure.name in shown}
    episode = Trajectory(
        episode_id="e", group_id="g", step=0, group_size=1, prompt_ids=b"", tokens=b"", loss_mask=b"", reward=1.0,
        metrics={"asked": 1.0},
    )  # fmt: skip
    known = {field.name for field in fields(StepStats)} | summary([episode], {}, step=0).keys()
    assert not known - names


def test_all_reasons_for_dropped_rollouts_are_on_the_page() -> None:
    known = {value for name, value in vars(DropReason).items() if name.isupper()}
    assert not known - {name for row in rows("docs/guides/monitoring.md", "Live") for name in row}


def test_the_errors_that_have_a_remedy_are_errors_of_the_code() -> None:
    tops = (ROOT / "common" / "ebbtide", ROOT / "services" / "ebbtide")
    code = "\n".join(path.read_text() for top in tops for path in top.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts over several lines
    page = "docs/guides/troubleshooting.md"
    for heading in ("Errors at submit", "Errors of a run that failed", "Warnings of a run that continues"):
        for message in (
            message for row in rows(page, heading) for message in row if message.islower() or " " in message
        ):
            if message.startswith("FILE:"):
                continue
            for part in re.split(r" N | 100 |: ", message):
                assert part in code, f"no error says {part!r}"
