"""Compares what a client told with the trace of its session: texts, calls, numbers of tokens and history."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class TraceReader:
    """Reads traces of one model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def differences(self, told: dict[str, Any], trace: dict[str, Any]) -> Iterator[str]:
        """What the client was told otherwise than it was sampled; nothing if all is right."""
        turns, answers = list(trace["turns"]), told["answers"]
        if len(turns) != len(answers) + told["own"]:
            yield f"{len(answers)} answers of {len(turns)} turns"
        made = [self._answer(turn, one) for turn in turns for one in turn["completions"]]
        for answer in answers:
            found = next((one for one in made if _fits(answer, one)), None)
            if found is None:
                yield f"no turn has {_shown(answer)}; they have {'; '.join(map(_shown, made))}"
            else:
                made.remove(found)
        if answers and not any(answer["text"] for answer in answers):
            yield "all texts are empty"
        prompts, asked = [self._text(turn["prompt_token_ids"], special=True) for turn in turns], told["asked"]
        lacking = sum(not any(one in prompt for one in asked) for prompt in prompts)
        if asked and lacking != told["own"]:
            yield f"{lacking} prompts lack {' or '.join(map(repr, asked))}"
        if unasked := [one for one in asked if not any(one in prompt for prompt in prompts)]:
            yield f"no prompt has {' or '.join(map(repr, unasked))}"
        if trace["unmatched_tokens"] or trace["unknown_answers"]:
            yield f"{trace['unmatched_tokens']} tokens of the history were not matched"

    def _answer(self, turn: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
        """As clients shall see it."""
        text = self._text(completion["token_ids"], special=False)
        calls = [json.loads(one) for one in _CALL.findall(text)]
        return {
            "text": _CALL.sub("", text),
            "calls": [[one["name"], one["arguments"]] for one in calls],
            "in": len(turn["prompt_token_ids"]),
            "out": len(completion["token_ids"]),
        }

    def _text(self, ids: Sequence[int], *, special: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text


def _fits(told: dict[str, Any], made: dict[str, Any]) -> bool:
    """Whether they are the same. What a client does not tell (null) is not compared."""
    return all(told[name] is None or told[name] == made[name] for name in ("text", "calls", "in", "out"))


def _shown(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False)[:200]
