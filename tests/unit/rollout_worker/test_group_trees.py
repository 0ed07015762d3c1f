"""Trees go with their groups, and their memory is bounded."""

from ebbtide.rollout_worker.engine.vllm.group_drafts import IDLE_S, TOKEN_BYTES, GroupTrees
from tests.fakes.plain_suffix_tree import PlainSuffixTree

TEXT = list(range(10, 40))


def trees(most_tokens: int = 1_000) -> GroupTrees:
    return GroupTrees(PlainSuffixTree, most_tokens * TOKEN_BYTES)


def test_a_member_is_drafted_from_what_another_one_made() -> None:
    kept = trees()
    kept.add("g", "one", 0, TEXT, 0.0)
    assert kept.find("g", [0, *TEXT[5:9]], 4, 0.0) == TEXT[9:13]


def test_other_groups_are_not_drafted_from() -> None:
    kept = trees()
    kept.add("g", "one", 0, TEXT, 0.0)
    assert kept.find("h", TEXT[:4], 4, 0.0) == []


def test_repeated_tokens_are_learnt_once() -> None:
    kept = trees()
    kept.add("g", "one", 0, TEXT[:10], 0.0)
    kept.add("g", "one", 4, TEXT[4:20], 0.0)
    kept.add("g", "one", 0, TEXT[:7], 0.0)
    assert kept.bytes == 20 * TOKEN_BYTES


def test_no_draft_spans_tokens_that_are_missing() -> None:
    kept = trees()
    kept.add("g", "one", 0, TEXT[:10], 0.0)
    kept.add("g", "one", 15, TEXT[15:], 0.0)
    assert kept.find("g", TEXT[4:10], 4, 0.0) == []
    assert kept.find("g", TEXT[15:19], 4, 0.0) == TEXT[19:23]


def test_memory_is_bounded_and_the_group_used_longest_ago_goes_first() -> None:
    kept = trees(most_tokens=70)
    for number, group in enumerate(["a", "b", "c"]):
        kept.add(group, "one", 0, TEXT, float(number))
        if group == "b":
            kept.find("a", TEXT[:4], 4, 1.5)
    assert kept.bytes <= 70 * TOKEN_BYTES
    assert kept.find("a", TEXT[:4], 4, 3.0)
    assert kept.find("b", TEXT[:4], 4, 3.0) == []


def test_a_group_that_needs_more_than_all_may_have_begins_anew() -> None:
    kept = trees(most_tokens=70)
    for number in range(3):
        kept.add("g", f"r{number}", 0, TEXT, float(number))
        assert kept.bytes <= 70 * TOKEN_BYTES
    assert kept.find("g", TEXT[:4], 4, 3.0) == []
    kept.add("g", "r2", 30, TEXT, 4.0)
    assert kept.find("g", TEXT[:4], 4, 4.0)


def test_memory_is_given_back_when_groups_are_idle_and_when_other_weights_come() -> None:
    kept = trees()
    for group in ("idle", "used"):
        kept.add(group, "one", 0, TEXT, 0.0)
    kept.find("used", TEXT[:4], 4, IDLE_S)
    kept.expire(IDLE_S + 1.0)
    assert ("idle" in kept, "used" in kept) == (False, True)
    assert (len(kept), kept.bytes) == (1, len(TEXT) * TOKEN_BYTES)
    kept.clear()
    assert (len(kept), kept.bytes) == (0, 0)
