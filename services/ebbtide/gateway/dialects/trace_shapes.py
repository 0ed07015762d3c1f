"""Shapes sessions and their traces as JSON: ids, logprobs, masks and versions, by turn and by branch.

Traces may be long. So call these in a thread: they encode each turn and branch by itself, and the event loop gets its
turn in between.
"""

from typing import Any, Final

import msgspec

from ebbtide.gateway.dialects.dialect import logprobs_of, version_spans
from ebbtide.gateway.sessions.trace import BranchTrace, CompletionTrace, SessionTrace, TurnTrace
from ebbtide.gateway.sessions.turns import names_of, unpack_settings
from ebbtide.types.run import Sampling
from ebbtide.types.session import Session

_encoder: Final = msgspec.json.Encoder()


def session_head(session: Session) -> dict[str, Any]:
    """What is known of a session without its tokens. Times are seconds."""
    names = names_of(session)
    return {
        "id": names.session,
        "object": "session",
        "run_id": session.run_id,
        "group_id": names.group or None,
        "state": session.state.name.lower(),
        "reward": names.reward if session.reward is None else session.reward,
        "verifier": session.verifier or None,
        "drop_reason": session.drop_reason or None,
        "turn_count": session.turns,
        "age_s": session.age_s,
        "idle_s": session.idle_s,
        "ends_in_s": session.ends_in_s,
    }


def trace_body(trace: SessionTrace) -> dict[str, Any]:
    """All tokens of these turns."""
    return {
        "turns": [_encoded(turn_body(turn)) for turn in trace.turns],
        "branches": [_encoded(_branch(branch)) for branch in trace.branches],
        "unmatched_tokens": trace.unmatched,
        "unknown_answers": trace.unknown,
        "until": trace.until,
        "has_more": trace.more,
    }


def turn_body(turn: TurnTrace) -> dict[str, Any]:
    """One turn. `prompt_mask` is 1 where the prompt repeats a token as it was sampled."""
    record = turn.turn.record
    return {
        "number": turn.turn.number,
        "parent": turn.parent and {"turn": turn.parent.turn, "completion": turn.parent.completion},
        "matched_by": record.origin.name.lower(),
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "prompt_mask": turn.sampled.tolist(),
        "unmatched_tokens": record.unmatched,
        "unknown_answers": record.unknown,
        "sampling": _sampling(unpack_settings(record.settings).sampling),
        "completions": [_completion(one) for one in turn.completions],
    }


def completions_body(trace: SessionTrace) -> dict[str, Any]:
    """All completions in the order of their turns, each with its whole prompt."""
    data = [
        _encoded(
            {
                "turn": turn.turn.number,
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "prompt_mask": turn.sampled.tolist(),
                **_completion(one),
            }
        )
        for turn in trace.turns
        for one in turn.completions
    ]
    return {"data": data, "until": trace.until, "has_more": trace.more}


def _encoded(body: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(body))


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """What of it decides the distribution of tokens."""
    ends = ("min_tokens", "stop_token_ids", "ignore_eos")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *ends)
    return {name: getattr(sampling, name) for name in names}


def _completion(one: CompletionTrace) -> dict[str, Any]:
    return {
        "id": one.rollout_id,
        "token_ids": one.tokens["id"].tolist(),
        "logprobs": logprobs_of(one.tokens),
        "weight_versions": version_spans(one.tokens),
        "delivered": one.delivered,
    }


def _branch(branch: BranchTrace) -> dict[str, Any]:
    return {
        "turns": list(branch.turns),
        "prompt_token_ids": branch.prompt_ids.tolist(),
        "token_ids": branch.tokens["id"].tolist(),
        "loss_mask": branch.loss_mask.tolist(),
        "sampled_mask": branch.sampled.tolist(),
        "logprobs": logprobs_of(branch.tokens),
        "weight_versions": branch.tokens["version"].tolist(),
    }
