"""A worker whose engine scores prompts says so, and stores scores whole, whatever comes between."""

from typing import Any

from ebbtide.ledger import read_ledger
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import PromptScores, unpack_scores
from tests.fakes.scripted_engine import follow, script_scores
from tests.fakes.scripted_fleet import PROMPT
from tests.fakes.scripted_settings import ScriptedSettings
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
ONE = Sampling(max_tokens=1)


def stored(house: House, name: str = "s") -> PromptScores:
    return unpack_scores(house.coordinator.stored[name], len(PROMPT), 2)


def check_scores(scores: PromptScores) -> None:
    ((token, _),) = follow(ScriptedSettings(), PROMPT, 1)
    assert scores.places.tolist() == script_scores(ScriptedSettings(), [*PROMPT, token], 2).tolist()
    assert scores.token["id"].tolist() == [token]


async def test_a_prompt_is_scored_and_stored_in_one_message(house: House) -> None:
    await house.worker(script={"scores": True})
    assert "score" in house.coordinator.attaches[0].capabilities
    house.coordinator.assign("s", ONE, prompt_logprobs=2)
    await wait_until(lambda: "s" in house.coordinator.finished)
    check_scores(stored(house))
    assert house.coordinator.messages == 1
    assert [record.generated for record in read_ledger(house.counter_file)] == [1]


async def test_scores_that_a_store_did_not_acknowledge_are_sent_again_whole(house: House) -> None:
    await house.worker(script={"scores": True})
    house.coordinator.lossy = True
    house.coordinator.assign("s", ONE, prompt_logprobs=2)
    await wait_until(lambda: "s" in house.coordinator.finished and not house.coordinator.lossy)
    check_scores(stored(house))


async def test_a_version_that_is_installed_meanwhile_makes_all_of_the_scores(house: House) -> None:
    await house.worker(script={"scores": True, "first_token_s": 0.5})
    house.coordinator.assign("s", ONE, prompt_logprobs=2)
    await wait_until(lambda: house.in_engine() == 1)
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: "s" in house.coordinator.finished)
    check_scores(stored(house))
    assert stored(house).version in (1, 2)


async def test_an_engine_that_does_not_score_promises_nothing(house: House) -> None:
    await house.worker()
    assert "score" not in house.coordinator.attaches[0].capabilities
    house.coordinator.assign("s", ONE, prompt_logprobs=2)  # no coordinator does
    await wait_until(lambda: "s" in house.coordinator.released())
    assert "score" in house.coordinator.released()["s"]
    assert house.coordinator.stored["s"] == b""
