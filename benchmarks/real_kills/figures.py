"""What the kills changed: each response against its undisturbed one, the workers' own ledgers, and how long it took."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
from msgspec import Struct

from benchmarks.real_kills.fleet import FLUSH_INTERVAL_MS, FLUSH_TOKENS, Fleet, Kill
from benchmarks.real_kills.rollouts import Answer, Rollouts
from ebbtide.ledger import AttemptRecord
from ebbtide.types.run import AttemptSpan
from ebbtide.types.tokens import TOKEN_BYTES

#: Logprobs nearer than this are the same.
EXACT: Final = 1e-3
Figures = dict[str, Any]


class Comparison(Struct):
    """Over all disturbed responses; `gap` is the largest difference of two logprobs, in nats."""

    equal: int = 0
    unequal: int = 0
    gap: float = 0.0
    lost: int = 0  # tokens that were acknowledged, or are part of the response, and are not in it
    doubled: int = 0  # tokens in a response beyond those of the undisturbed one, or in a second finish


def compare(rollouts: Rollouts) -> Comparison:
    """The first answer to each prompt is the undisturbed one."""
    found = Comparison()
    references = rollouts.answers[: rollouts.prompts]
    for number, answer in enumerate(rollouts.answers[rollouts.prompts :]):
        _compare(found, references[number % rollouts.prompts], answer)
    return found


def _compare(found: Comparison, reference: Answer, answer: Answer) -> None:
    whole, got = reference.tokens, answer.tokens
    shared = min(len(whole), len(got))
    gap = float(np.max(np.abs(whole["logprob"][:shared] - got["logprob"][:shared]), initial=0.0))
    same = np.array_equal(whole["id"], got["id"]) and len(answer.finishes) == 1 and not answer.torn
    found.equal += same
    found.unequal += not same
    found.gap = max(found.gap, gap)
    final = answer.finishes[0] if answer.finishes else b""
    read = answer.stored
    kept = next((i for i in range(len(read)) if read[i : i + 1] != final[i : i + 1]), len(read)) // TOKEN_BYTES
    found.lost += len(read) // TOKEN_BYTES - kept + max(0, len(whole) - len(got))
    found.doubled += max(0, len(got) - len(whole)) + sum(len(more) // TOKEN_BYTES for more in answer.finishes[1:])


def generated_twice(rollouts: Rollouts, ledger: Iterable[AttemptRecord]) -> tuple[int, int, int]:
    """By the workers' own count: tokens generated in all, those twice, and the most of one rollout for each time that
    it was interrupted, rounded up.
    """
    made: dict[str, int] = defaultdict(int)
    attempts: dict[str, int] = defaultdict(int)
    for record in ledger:
        made[record.rollout_id] += record.generated
        attempts[record.rollout_id] += 1
    over = {name: count - len(rollouts.answers[int(name[1:])].tokens) for name, count in made.items()}
    most = max((-(-count // max(1, attempts[name] - 1)) for name, count in over.items()), default=0)
    return sum(made.values()), sum(over.values()), most


def latencies(
    kills: Sequence[Kill], lost: Sequence[Figures], spans: Iterable[AttemptSpan], rollouts: Rollouts
) -> tuple[list[float], list[float], int]:
    """Seconds from each kill to its detection; from there to the next new token of each rollout that was cut; and how
    many were cut."""
    noticed = {entry["worker_id"]: datetime.fromisoformat(entry["timestamp"]).timestamp() for entry in lost}
    detection = [noticed[kill.worker] - kill.at for kill in kills if kill.worker in noticed]
    resume: list[float] = []
    cut = [span for span in spans if span.end not in {"finished", "cancelled"} and span.worker_id in noticed]
    for span in cut:
        answer = rollouts.answers[int(span.rollout_id[1:])]
        after = [when for when, end in answer.pieces if end > span.last]
        resume += [max(0.0, min(after) - noticed[span.worker_id])] if after else []
    return detection, resume, len(cut)


def gather(fleet: Fleet, rollouts: Rollouts, spans: Sequence[AttemptSpan]) -> Figures:
    """All of them, by name."""
    found = compare(rollouts)
    made, twice, most = generated_twice(rollouts, fleet.cluster.ledger())
    detection, resume, cut = latencies(fleet.kills, fleet.cluster.logged("coordinator", "lost"), spans, rollouts)
    disturbed = len(rollouts.answers) - rollouts.prompts
    owned = sum(span.last - span.first for span in spans)
    stored = sum(len(answer.tokens) for answer in rollouts.answers)
    return {
        "kills": len(fleet.kills),
        "prompts": rollouts.prompts,
        "rollouts": disturbed,
        "response_tokens": len(rollouts.answers[0].tokens),
        "equal_responses": found.equal,
        "unequal_responses": found.unequal,
        "largest_logprob_gap": found.gap,
        "acknowledged_tokens_lost": found.lost,
        "acknowledged_tokens_doubled": found.doubled + max(0, owned - stored),
        "rollouts_interrupted": cut,
        "tokens_generated": made,
        "tokens_generated_twice": twice,
        "share_generated_twice": twice / max(1, made),
        "tokens_generated_twice_at_most_per_interruption": most,
        "flush_tokens": FLUSH_TOKENS,
        "flush_interval_ms": FLUSH_INTERVAL_MS,
        "attempts_per_rollout": (len(spans) - rollouts.prompts) / max(1, disturbed),
        **_quantiles("detection", detection),
        **_quantiles("resume", resume),
        "boot_s": fleet.boot_s,
    }


def _quantiles(name: str, seconds: Sequence[float]) -> Figures:
    if not seconds:
        return {f"{name}_p50_s": None, f"{name}_p99_s": None}
    return {f"{name}_p{share}_s": float(np.quantile(seconds, share / 100)) for share in (50, 99)}
