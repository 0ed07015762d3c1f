"""A session's trace, beside the conversation that its agent had."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from ebbtide.demo.agents.trace_text import runs_of, short_ids, trace_lines, trace_mismatches

CALL = '[look(at="bo")]'
#: What each id stands for: a character's own code, and an end of text.
END = 0


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(one) for one in ids if one != END)


def ids_of(text: str) -> list[int]:
    return list(map(ord, text))


def completion(text: str, version: int) -> dict[str, Any]:
    ids = [*ids_of(text), END]
    spans = [{"version": str(version), "start": 0, "end": len(ids)}]
    return {"id": text, "token_ids": ids, "logprobs": [-0.5] * len(ids), "weight_versions": spans}


def made_trace() -> dict[str, Any]:
    """Two turns: a call, whose answer `is 7` follows, and the number."""
    opening, (first, second), between = ids_of("bo"), (completion(CALL, 3), completion("7", 4)), ids_of("is 7")
    begun = [*opening, *first["token_ids"], *between]
    mask = [*[0] * 2, *[1] * len(first["token_ids"]), *[0] * 4]
    branch = {
        "prompt_token_ids": opening,
        "token_ids": [*first["token_ids"], *between, *second["token_ids"]],
        "loss_mask": [*[1] * len(first["token_ids"]), *[0] * 4, *[1] * 2],
        "logprobs": [*first["logprobs"], *[0.0] * 4, *second["logprobs"]],
        "weight_versions": [*[3] * len(first["token_ids"]), *[0] * 4, *[4] * 2],
    }
    turns = [
        {"matched_by": "first", "prompt_token_ids": opening, "prompt_mask": [0, 0], "completions": [first]},
        {"matched_by": "continued", "prompt_token_ids": begun, "prompt_mask": mask, "completions": [second]},
    ]
    return {
        "id": "one",
        "group_id": "g",
        "turns": turns,
        "branches": [branch],
        "unmatched_tokens": 0,
        "unknown_answers": 0,
    }


def conversation() -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": '{"at": "bo"}'}
    return [
        {"role": "user", "content": "bo"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "is 7"},
        {"role": "assistant", "content": "7"},
    ]


def test_a_trace_of_what_the_agent_got_has_no_mismatch() -> None:
    assert trace_mismatches(made_trace(), conversation(), decode) == []


@pytest.mark.parametrize(("at", "content"), [(3, "8"), (1, "bo"), (1, "")])
def test_another_text_than_the_sampled_one_is_a_mismatch(at: int, content: str) -> None:
    told = conversation()
    told[at] = {"role": "assistant", "content": content}
    (found,) = trace_mismatches(made_trace(), told, decode)
    assert "another text" in found


def test_a_call_that_the_gateway_gave_as_text_is_no_mismatch() -> None:
    told = conversation()
    told[1] = {"role": "assistant", "content": CALL}
    assert trace_mismatches(made_trace(), told, decode) == []


def test_a_call_with_other_arguments_is_a_mismatch() -> None:
    told = conversation()
    told[1]["tool_calls"][0]["function"]["arguments"] = '{"at": "ba"}'
    assert "turn 1" in trace_mismatches(made_trace(), told, decode)[0]


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "weight_versions", "loss_mask"])
def test_a_token_that_is_trained_otherwise_than_it_was_sampled_is_a_mismatch(field: str) -> None:
    trace = deepcopy(made_trace())
    trace["branches"][0][field][0] = 0 if field == "loss_mask" else -9
    assert "tokens to train on" in trace_mismatches(trace, conversation(), decode)[0]


def test_branches_are_trained_on_together_and_each_token_once() -> None:
    trace = made_trace()
    (whole,) = trace["branches"]
    first, second = deepcopy(whole), deepcopy(whole)
    first["loss_mask"][-2:] = [0, 0]
    second["loss_mask"][:16] = [0] * 16
    trace |= {"branches": [second, first], "unmatched_tokens": 16}
    assert trace_mismatches(trace, conversation(), decode) == []
    first["loss_mask"][-1] = 1
    assert "19 tokens to train on" in trace_mismatches(trace, conversation(), decode)[0]


def test_a_lost_or_a_further_completion_is_a_mismatch() -> None:
    assert "1 answers, and 2 completions" in trace_mismatches(made_trace(), conversation()[:2], decode)[0]


def test_a_shown_trace_names_what_each_turn_adds_samples_and_by_which_version() -> None:
    shown = "\n".join(trace_lines(made_trace(), decode, reward=1.0, moves={"7": "went on elsewhere"}))
    assert "Session one of group g, reward 1\nturn 1" in shown
    assert shown.count("went on elsewhere") == 1
    assert "turn 1 (first): a prompt of 2 tokens, mask 0*2" in shown
    assert "turn 2 (continued): a prompt of 22 tokens, mask 0*2 1*16 0*4" in shown
    assert f"{CALL!r}\n             16 tokens of version 3, logprob -8.00 in all" in shown
    assert "added    105 115 32 55  'is 7'" in shown
    assert "trained on: 18 of 22 tokens, loss mask 1*16 0*4 1*2 after a prompt of 2" in shown


def test_masks_and_long_lists_of_ids_are_shortened() -> None:
    assert runs_of([]) == "empty"
    assert short_ids(range(9)) == "0 1 2 3 4 5 6 7 8"
    assert short_ids(range(20)) == "0 1 2 3 ... 16 17 18 19"
