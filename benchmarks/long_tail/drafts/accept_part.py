"""Measures how many tokens of a sample a step makes, by the number of siblings, on one worker and across two.

Drawn responses (`phrase_books`) are drafted by the worker's own proposer from ArcticInference's trees, in virtual time.
All members run at once, as rollouts of a group do. Across two workers each has half of them, and gets what the other
one made at its flushes. Beside it stands the accept length with siblings that are there whole, as Seer reports it.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any, Final

from msgspec import Struct, to_builtins

from benchmarks.long_tail.drafts.phrase_books import drawn_group
from benchmarks.long_tail.drafts.verifying_worker import VERSION, VerifyingWorker
from ebbtide.rollout_worker.engine import SiblingRun
from ebbtide.types.tokens import pack_ids

_TOKENS: Final = 6_000
SIBLINGS: Final = (0, 1, 3, 7)
#: Seer's numbers of whole siblings, and its accept lengths (arXiv 2511.14617 v3, linear drafts).
PUBLISHED: Final = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}
#: A step of a large model, bound by memory: drafts cost little, so that acceptance alone is measured.
_STEP_S, _TOKEN_S = 0.025, 1e-5
#: Tokens leave a worker in flushes, at the default interval, and then take this long to another worker.
_FLUSH_S, _WAY_S = 0.25, 0.02
_GROUPS, _QUICK_GROUPS = 6, 2


class AcceptLengths(Struct, frozen=True, kw_only=True):
    """Means over groups. `whole`: with siblings that had ended."""

    siblings: int
    within: float | None = None
    across: float | None = None
    whole: float | None = None
    published: float | None = None


def accept_part(tell: Callable[[str], None], *, quick: bool, jobs: int) -> dict[str, Any]:
    """Accept lengths. Raises `ImportError` without ArcticInference."""
    from arctic_inference.suffix_decoding import _C  # noqa: F401 - a part that cannot run says so at once

    seeds = [f"accept {number}" for number in range(_QUICK_GROUPS if quick else _GROUPS)]
    with ProcessPoolExecutor(jobs) as pool:
        found = [
            AcceptLengths(
                siblings=siblings,
                within=fmean(pool.map(partial(accepted, siblings + 1, 1), seeds)),
                across=fmean(pool.map(partial(accepted, siblings + 1, 2), seeds)) if siblings else None,
            )
            for siblings in SIBLINGS
        ]
        found += [
            AcceptLengths(siblings=siblings, whole=fmean(pool.map(partial(with_whole, siblings), seeds)), published=one)
            for siblings, one in PUBLISHED.items()
        ]
    for one in found:
        tell(_row(one))
    ratios = [one.across / one.within for one in found if one.across and one.within]
    return {
        "figures": {"accept_length_across_over_within": min(ratios)},
        "accept_lengths": to_builtins(found),
        "accept_settings": {"tokens": _TOKENS, "step_s": _STEP_S, "flush_s": _FLUSH_S, "way_s": _WAY_S},
    }


def accepted(members: int, workers: int, seed: str, tokens: int = _TOKENS) -> float:
    """The accept length of a group's members that run at once on so many workers, one group's."""
    responses = {f"r{number}": ids for number, ids in enumerate(drawn_group(seed, members, tokens))}
    names = list(responses)
    fleet = [_worker({name: responses[name] for name in names[at::workers]}) for at in range(workers)]
    flights: list[tuple[float, int, list[SiblingRun]]] = []  # when they arrive, and where
    flushed, told = 0.0, [dict[str, int]() for _ in fleet]
    while running := [worker for worker in fleet if not worker.done]:
        worker = min(running, key=lambda one: one.now)
        while worker.now >= flushed + _FLUSH_S:
            flushed += _FLUSH_S
            for at, one in enumerate(fleet):
                flights += [(flushed + _WAY_S, to, one.news(told[at])) for to in range(workers) if to != at]
                told[at] = {name: one.made_of(name) for name in names[at::workers]}
        here = fleet.index(worker)
        for arrives, _, news in [one for one in flights if one[1] == here and one[0] <= worker.now]:
            worker.batch.learn(news, [], arrives)
        flights = [one for one in flights if one[1] != here or one[0] > worker.now]
        worker.step()
    return sum(worker.made for worker in fleet) / sum(worker.verifications for worker in fleet)


def with_whole(siblings: int, seed: str, tokens: int = _TOKENS) -> float:
    """The accept length of one response whose siblings have ended."""
    responses = drawn_group(seed, siblings + 1, tokens)
    worker = _worker({"r": responses[0]})
    ended = [SiblingRun("g", VERSION, f"s{at}", 0, pack_ids(ids)) for at, ids in enumerate(responses[1:])]
    worker.batch.learn(ended, [], 0.0)
    worker.run()
    return worker.accept_length


def _worker(responses: dict[str, list[int]]) -> VerifyingWorker:
    from arctic_inference.suffix_decoding._C import SuffixTree

    return VerifyingWorker(SuffixTree, responses, base_s=_STEP_S, token_s=_TOKEN_S)


def _row(one: AcceptLengths) -> str:
    if one.whole is not None:
        return f"accept length, {one.siblings:2} whole siblings: {one.whole:.2f} (Seer {one.published:.2f})"
    across = f", across two {one.across:.2f}" if one.across else ""
    return f"accept length, {one.siblings:2} live siblings: {one.within:.2f} on one worker{across}"
