"""Compares sessions' traces with what the engines made, as their script says.

A token is a function of all ids before it. So each span of a branch that is said to be sampled shows by itself whether
its tokens, logprobs and place are those of an engine.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.gateway.answer_check import rollout_of
from benchmarks.gateway.conversation_crowd import AnsweredTurn
from benchmarks.gateway.disturbed_fleet import SCRIPT
from tests.fakes.scripted_engine import follow


def wrong_traces(traces: Mapping[str, Any], turns: Iterable[AnsweredTurn], *, version: int) -> list[str]:
    """The request ids of turns that a trace tells otherwise than their client, and the session ids of wrong branches.

    A session without a trace counts with all its turns.
    """
    by_session = defaultdict(list)
    for turn in turns:
        by_session[turn.session_id].append(turn)
    wrong: list[str] = []
    for session_id, answered in by_session.items():
        trace = traces.get(session_id, {"turns": [], "branches": []})
        told = {one["completions"][0]["id"]: one for one in trace["turns"]}
        wrong += [turn.request_id for turn in answered if not _is_told(turn, told.get(rollout_of(turn)), version)]
        if not _are_exact(trace["branches"], sum(len(turn.ids) for turn in answered), version):
            wrong.append(session_id)
    return wrong


def _is_told(turn: AnsweredTurn, told: Any, version: int) -> bool:
    if told is None:
        return False
    completion = told["completions"][0]
    whole = [{"version": str(version), "start": 0, "end": len(turn.ids)}]
    found = [told["prompt_token_ids"], *(completion[name] for name in ("token_ids", "logprobs", "weight_versions"))]
    return found == [turn.prompt_ids, turn.ids, turn.logprobs, whole]


def _are_exact(branches: Sequence[Any], sampled: int, version: int) -> bool:
    """Whether all that is masked as sampled was sampled there, and each sampled token is trained on once."""
    trained = sum(sum(branch["loss_mask"]) for branch in branches)
    return trained == sampled and all(_is_exact_branch(branch, version) for branch in branches)


def _is_exact_branch(branch: Any, version: int) -> bool:
    ids, mask = branch["prompt_token_ids"] + branch["token_ids"], branch["sampled_mask"]
    if any(trained > made for trained, made in zip(branch["loss_mask"], mask, strict=True)):
        return False
    before = len(branch["prompt_token_ids"])
    for made, start, end in _spans(mask):
        versions = branch["weight_versions"][start:end]
        if versions != [version if made else 0] * (end - start):
            return False
        told = list(zip(branch["token_ids"][start:end], branch["logprobs"][start:end], strict=True))
        if made and told != follow(SCRIPT, ids[: before + start], end - start):
            return False
    return True


def _spans(mask: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Value, begin and end of each run of equal values."""
    begin = 0
    for value, run in groupby(mask):
        end = begin + len(list(run))
        yield value, begin, end
        begin = end
