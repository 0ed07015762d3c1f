"""Completions' texts do not depend on how their tokens were cut into chunks."""

import random

import numpy as np
import pytest

from ebbtide.gateway.decode import ChoiceResult, ChoiceText, StopStrings
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN, TokenArray
from tests.fakes.model_texts import random_text
from tests.fakes.scripted_rollouts import MarkedOutputs, scripted_model


@pytest.fixture(scope="module")
def model(sandbox: TemplateSandbox) -> ServedModel:
    return scripted_model(sandbox)


def records(ids: list[int]) -> TokenArray:
    made = np.zeros(len(ids), dtype=TOKEN)
    made["id"] = ids
    made["version"] = np.arange(len(ids)) // 5 + 1
    return made


def played(choice: ChoiceText, ids: list[int], reason: FinishReason, draw: random.Random) -> ChoiceResult:
    """The result of pushing `ids` in random pieces, sometimes with the reason in a chunk of its own."""
    result, place = ChoiceResult(0), 0
    while not choice.finished:
        size = draw.randint(1, 6)
        part = ids[place : place + size]
        place += size
        last = place >= len(ids) and (not part or draw.random() < 0.5)
        result.add(choice.push(records(part), reason if last else None))
    return result


@pytest.mark.parametrize("seed", range(30))
def test_every_cut_gives_the_same_text_and_tokens(model: ServedModel, seed: int) -> None:
    draw = random.Random(seed)
    text = random_text(draw, 60)
    stop = text[20 : 20 + draw.randint(1, 5)]
    ids = [*model.encode(text, special=False), model.eos_ids[0]]
    for stops in ([], [stop], [stop, "dog", "é"]):
        for skip_special in (False, True):
            found = set()
            for _ in range(6):
                decoder = model.detokenizer((), skip_special=skip_special, hidden_ends=model.eos_ids)
                choice = ChoiceText(0, decoder, stops=StopStrings(stops) if stops else None)
                result = played(choice, ids, FinishReason.STOP, draw)
                found.add((result.text, tuple(result.tokens["id"].tolist()), str(result.finish)))
            assert len(found) == 1
            shown, used, _ = found.pop()
            assert all(one not in shown for one in stops)
            assert list(used) == ids[: len(used)]
            if not stops and not skip_special:
                assert (shown, list(used)) == (text, ids)


def test_within_min_tokens_no_stop_string_counts(model: ServedModel) -> None:
    ids = model.encode("the dog and the dog", special=False)
    first = model.encode("the dog", special=False)
    decoder = model.detokenizer((), skip_special=True)
    choice = ChoiceText(0, decoder, stops=StopStrings(["dog"]), min_tokens=len(first))
    result = ChoiceResult(0)
    result.add(choice.push(records(ids), None))
    assert result.text == "the dog and the "
    assert choice.stopped_early


def test_text_held_back_for_a_stop_is_shown_at_the_end(model: ServedModel) -> None:
    ids = model.encode("The quick fo", special=False)
    choice = ChoiceText(0, model.detokenizer((), skip_special=True), stops=StopStrings(["fox"]))
    result = ChoiceResult(0)
    result.add(choice.push(records(ids), FinishReason.LENGTH))
    assert result.text == "The quick fo"
    assert result.finish is not None
    assert result.finish.reason == "length"


@pytest.mark.parametrize("whole", [False, True])
def test_a_parser_sees_all_text_once(model: ServedModel, whole: bool) -> None:
    text = '<think>so</think>I look.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = [*model.encode(text, special=False), model.eos_ids[0]]
    parser = MarkedOutputs().parser(tools=[{}], tool_choice="auto", call_seed="q-1")
    decoder = model.detokenizer((), skip_special=False, hidden_ends=model.eos_ids)
    result = played(ChoiceText(0, decoder, parser=parser, whole=whole), ids, FinishReason.STOP, random.Random(1))
    assert (result.reasoning, result.text) == ("so", "I look.")
    assert [call["name"] for call in result.calls] == ["f"]
    assert result.tokens["id"].tolist() == ids
