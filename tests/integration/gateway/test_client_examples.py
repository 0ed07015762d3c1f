"""The examples of the guides to the gateway and its clients work as they stand, with the clients that they are for."""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from ebbtide.auth.credential_files import ReloadedFiles
from ebbtide.auth.security import ClientSecurity, TokenCheck
from ebbtide.gateway.access import KeyRing, RequestLimits
from ebbtide.gateway.http.app import make_app
from ebbtide.gateway.http.server import HttpServer
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.gateway.templates import TemplateSandbox
from tests.fakes.scripted_app_state import scripted_app_state
from tests.fakes.scripted_rollouts import ScriptedCatalog, ScriptedSource, scripted_model, scripted_run

GUIDES: Final = Path(__file__).parents[3] / "docs" / "guides"
ANSWER: Final = "The dog sleeps on in Zürich."
KEY: Final = "the-key"


def examples(heading: str, page: str = "clients.md") -> list[str]:
    """The code of a section."""
    section = re.split(r"^#+ ", (GUIDES / page).read_text().partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)


@pytest.fixture
async def source() -> AsyncIterator[ScriptedSource]:
    sandbox = TemplateSandbox(processes=1)
    made = ScriptedSource(scripted_run("my-run-1", name="my-run"), scripted_model(sandbox))
    made.answer = ANSWER
    yield made
    sandbox.close()


@pytest.fixture
async def play(source: ScriptedSource, tmp_path: Path) -> AsyncIterator[Callable[[str], Any]]:
    """Runs an example against a gateway, and returns its variables; of curl, what it shows."""
    check = TokenCheck(f"Bearer {KEY}")
    keys = KeyRing(ReloadedFiles((), lambda: check), None)
    state = scripted_app_state(ScriptedCatalog([source]), keys, RequestLimits())
    await state.directory.refresh()
    server = HttpServer(make_app(state), GatewaySettings(security=ClientSecurity(token=KEY), listen="127.0.0.1:0"))
    await server.start()
    key = tmp_path / "agent.jwt"
    key.write_text(f"{KEY}\n")

    def run(code: str) -> Any:
        fitted = code.replace("127.0.0.1:7640", server.address).replace("agent.jwt", str(key))
        if code.startswith("curl"):
            return subprocess.run(["bash", "-c", fitted], check=True, capture_output=True, text=True).stdout
        variables: dict[str, Any] = {}
        exec(compile(fitted, "example", "exec"), variables)  # noqa: S102 - the page is ours
        return variables

    yield lambda code: asyncio.to_thread(run, code)
    await server.stop()


async def test_the_openai_client_comes_back_for_its_answer(
    play: Callable[[str], Any], source: ScriptedSource, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, agent = examples("The openai client")
    variables = await play(chat)
    assert variables["choice"].message.content == variables["streamed"] == ANSWER
    assert variables["again"].choices[0].token_ids == variables["choice"].token_ids
    first, _ = source.submitted
    assert variables["choice"].token_ids == source.ids(first)[0]
    await play(agent)
    assert len({one.episode_id for one in source.submitted.values()}) == 1
    assert capsys.readouterr().out.endswith(f"{ANSWER}\n")


async def test_the_anthropic_client_streams(play: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples("The anthropic client")
    await play(code)
    assert capsys.readouterr().out.endswith(ANSWER)


async def test_verifiers_token_client_finds_all_that_it_reads(
    play: Callable[[str], Any], source: ScriptedSource
) -> None:
    (code,) = examples("verifiers and prime-rl")
    variables = await play(code)
    (rollout,) = source.submitted
    assert variables["choice"]["token_ids"] == source.ids(rollout)[0]
    assert len(variables["logprobs"]) == len(variables["choice"]["token_ids"])
    assert variables["context"] == source.model.context


async def test_trls_http_half_gets_its_completions_in_order(play: Callable[[str], Any], source: ScriptedSource) -> None:
    (code,) = examples("TRL")
    variables = await play(code)
    assert variables["prompt_ids"] == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert variables["completion_ids"] == [source.ids(rollout)[0] for rollout in source.submitted]
    assert list(map(len, variables["logprobs"])) == list(map(len, variables["completion_ids"]))
    assert variables["world_size"] >= 1


async def test_a_client_of_sglang_gets_ids_logprobs_and_versions(
    play: Callable[[str], Any], source: ScriptedSource
) -> None:
    (code,) = examples("Clients of SGLang")
    variables = await play(code)
    (rollout,) = source.submitted
    assert variables["ids"] == source.ids(rollout)[0]
    assert variables["meta"]["weight_version_end"] == 3


async def test_a_harness_adds_up_the_logprobs_of_a_continuation(
    play: Callable[[str], Any], source: ScriptedSource
) -> None:
    (code,) = examples("Scored prompts", "agents-and-gateway.md")
    variables = await play(code)
    (rollout,) = source.submitted
    own = source.scores(rollout)["logprob"][:, 0].tolist()
    assert variables["loglikelihood"] == pytest.approx(sum(own[2:4]))
    assert len(variables["likeliest"]) == 2


async def test_curl_shows_the_events(play: Callable[[str], Any]) -> None:
    (code,) = examples("curl")
    shown = await play(code)
    assert shown.count("data: ") > 2
    assert shown.rstrip().endswith("data: [DONE]")
