"""Compares the trace of a session with the conversation that its agent had, and shows it turn by turn. Pure.

A trace is what `GET /v1/sessions/{id}` answers. Ids become text by the model's own tokenizer.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

Message = Mapping[str, Any]
Decode = Callable[[Sequence[int]], str]

#: Ids shown from either end of a list.
_SHOWN: Final = 4


def trace_mismatches(trace: Mapping[str, Any], conversation: Sequence[Message], decode: Decode) -> list[str]:
    """Says what in a trace is not what the agent got, or is not to be trained as it was sampled. Empty: all agrees.

    Holds for an agent that asks for one completion after another. Where it sends an answer back that could not be
    matched, a branch begins; still each sampled token is to be trained on once.
    """
    answers = [one for one in conversation if one["role"] == "assistant"]
    completions = [one for turn in trace["turns"] for one in turn["completions"]]
    sampled = [one["token_ids"] for one in completions]
    found = []
    if len(sampled) != len(answers):
        found.append(f"{len(answers)} answers, and {len(sampled)} completions")
    for number, (ids, answer) in enumerate(zip(sampled, answers, strict=False), 1):
        if not _same(decode(ids), answer):
            found.append(f"turn {number}: the agent got another text than {decode(ids)!r}")
    trained, generated = list(chain.from_iterable(map(_trained, trace["branches"]))), _generated(completions)
    if len(trace["branches"]) > 1:  # they share beginnings, so the order is another one
        trained, generated = sorted(trained), sorted(generated)
    if trained != generated:
        found.append(f"{len(trained)} tokens to train on are not the {len(generated)} sampled ones")
    return found


def _same(text: str, answer: Message) -> bool:
    """Whether a response's text is the message that the agent got."""
    if not (calls := answer.get("tool_calls")):
        return text == (answer.get("content") or "")
    told = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
    return _written_calls(text) == told


def _written_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Reads calls as the model writes them: `[name(argument="value")]`. Empty if the text is something else."""
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        calls = expression.elts if isinstance(expression, ast.List) else []
        return [_call(one) for one in calls]
    except (SyntaxError, ValueError):
        return []


def _call(call: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call")  # noqa: TRY004 - as of `ast.literal_eval`
    return call.func.id, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def _generated(completions: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, int]]:
    """Id, logprob and version of each sampled token, in order."""
    found = []
    for one in completions:
        spans = ([int(span["version"])] * (span["end"] - span["start"]) for span in one["weight_versions"])
        found += list(zip(one["token_ids"], one["logprobs"], chain.from_iterable(spans), strict=True))
    return found


def _trained(branch: Mapping[str, Any]) -> list[tuple[int, float, int]]:
    """The same of each token with loss mask 1."""
    parts = zip(branch["token_ids"], branch["logprobs"], branch["weight_versions"], branch["loss_mask"], strict=True)
    return [(token, logprob, version) for token, logprob, version, mask in parts if mask]


def trace_lines(trace: Mapping[str, Any], decode: Decode, *, reward: float, moves: Mapping[str, str]) -> Iterator[str]:
    """Shows each turn: what its prompt repeats and adds, and what was sampled, by which versions.

    `moves`: completion -> what became of it on its way.
    """
    yield f"Session {trace['id']} of group {trace['group_id']}, reward {reward:g}"
    for number, turn in enumerate(trace["turns"], 1):
        ids, mask = turn["prompt_token_ids"], turn["prompt_mask"]
        last = max((at for at, one in enumerate(mask) if one), default=-1)
        yield f"turn {number} ({turn['matched_by']}): a prompt of {len(ids)} tokens, mask {runs_of(mask)}"
        yield f"    added    {short_ids(ids[last + 1 :])}  {decode(ids[last + 1 :])!r}"
        for one in turn["completions"]:
            versions = ", ".join(f"version {span['version']}" for span in one["weight_versions"])
            logprob = sum(one["logprobs"])
            yield f"    sampled  {short_ids(one['token_ids'])}  {decode(one['token_ids'])!r}"
            yield f"             {len(one['token_ids'])} tokens of {versions}, logprob {logprob:.2f} in all"
            if one["id"] in moves:
                yield f"             {moves[one['id']]}"
    for branch in trace["branches"]:
        mask = branch["loss_mask"]
        count = f"{sum(mask)} of {len(mask)} tokens"
        yield f"trained on: {count}, loss mask {runs_of(mask)} after a prompt of {len(branch['prompt_token_ids'])}"


def runs_of(mask: Sequence[int]) -> str:
    """Writes a mask by its runs: `0*11 1*18` for eleven zeros and eighteen ones."""
    parts: list[list[int]] = []
    for one in mask:
        if not parts or parts[-1][0] != one:
            parts.append([one, 0])
        parts[-1][1] += 1
    return " ".join(f"{value}*{count}" for value, count in parts) or "empty"


def short_ids(ids: Sequence[int]) -> str:
    """Writes ids, the middle of a long list left out."""
    if len(ids) <= 2 * _SHOWN + 1:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:_SHOWN]))} ... {' '.join(map(str, ids[-_SHOWN:]))}"
