"""`make test-clients` finds what a client shows otherwise than it was sampled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.answers import TraceReader
from tests.clients.bigram_model import bigram_logits, bigram_tokenizer
from tests.clients.page import ClientRow, write_table
from tests.fakes.model_texts import END

PROMPT = "<|im_start|>user\nWhere is the dog?<|im_end|>\n<|im_start|>assistant\n"
CALLED = 'I look.<tool_call>{"name": "look", "arguments": {"at": "toma"}}</tool_call><|im_end|>'
TOLD: dict[str, Any] = {"text": "I look.", "calls": [["look", {"at": "toma"}]], "in": None, "out": None}


@pytest.fixture
def reader(tmp_path: Path) -> TraceReader:
    bigram_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return TraceReader(tmp_path)


def found(
    reader: TraceReader, *answers: dict[str, Any], asked: Sequence[str] = ("Where is the dog?",), **trace: int
) -> list[str]:
    """What differs between these answers and one turn with a call."""
    tokenizer = bigram_tokenizer()
    turn = {
        "prompt_token_ids": tokenizer.encode(PROMPT).ids,
        "completions": [{"token_ids": tokenizer.encode(CALLED).ids}],
    }
    told = {"answers": answers, "asked": asked, "own": 0}
    whole = {"turns": [turn], "unmatched_tokens": 0, "unknown_answers": 0} | trace
    return list(reader.differences(told, whole))


def test_an_answer_as_it_was_sampled_is_right(reader: TraceReader) -> None:
    counts = {"in": len(bigram_tokenizer().encode(PROMPT).ids), "out": len(bigram_tokenizer().encode(CALLED).ids)}
    assert found(reader, TOLD) == found(reader, TOLD | counts) == []


@pytest.mark.parametrize("change", [{"text": "I look"}, {"calls": []}, {"in": 1}, {"out": 1}])
def test_a_wrong_text_call_or_count_is_named(reader: TraceReader, change: dict[str, Any]) -> None:
    (difference,) = found(reader, TOLD | change)
    assert "no turn has" in difference


def test_a_scenario_of_empty_texts_is_wrong(reader: TraceReader) -> None:
    assert "all texts are empty" in found(reader, TOLD | {"text": ""})


def test_an_answer_opens_with_the_character_of_bytes_and_never_with_the_end() -> None:
    tokenizer = bigram_tokenizer()
    logits, end = bigram_logits(tokenizer), tokenizer.token_to_id(END)
    for prompt in (PROMPT, "Where is the dog?"):
        assert tokenizer.decode([int(logits[tokenizer.encode(prompt).ids[-1]].argmax())]) == "\ufffd"
    party = tokenizer.encode("🎉").ids
    assert all(logits[one, end] < -20 for one in (tokenizer.encode(PROMPT).ids[-1], *party))
    assert logits[tokenizer.encode(" dog").ids[-1], end] > 0
    called = tokenizer.encode("</tool_call>").ids[-1]
    assert logits[called].argmax() == end


def test_lost_answers_prompts_and_history_are_named(reader: TraceReader) -> None:
    assert found(reader) == ["0 answers of 1 turns"]
    assert "lack 'Who?'" in found(reader, TOLD, asked=["Who?"])[0]
    assert found(reader, TOLD, asked=["Where is the dog?", "Who?"]) == ["no prompt has 'Who?'"]
    assert "not matched" in found(reader, TOLD, unmatched_tokens=3)[0]


def test_the_table_stands_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    own = (Path(__file__).parents[2] / "docs" / "guides" / "clients.md").read_text().split("\n")
    marks = [line for line in own if line.startswith("<!--")]
    page.write_text("\n".join(["before", marks[0], "old", marks[1], "behind"]))
    write_table(page, [ClientRow(client="a|b", version="1", ran="chat", result="right", right=True)])
    text = page.read_text()
    assert "| a/b | 1 | chat | right |" in text
    assert (text.startswith("before\n"), text.endswith("\nbehind"), "old" in text) == (True, True, False)
