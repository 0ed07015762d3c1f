"""Trees go with the group and the version, and their memory is bounded."""

from ebbtide.rollout_worker.engine.vllm.drafts.group_trees import IDLE_S, TOKEN_BYTES, GroupTrees
from tests.fakes.plain_suffix_tree import PlainSuffixTree

TEXT = list(range(10, 40))


def trees(most_tokens: int = 1_000) -> GroupTrees:
    return GroupTrees(PlainSuffixTree, most_tokens * TOKEN_BYTES)


def test_a_member_is_drafted_from_what_another_one_made() -> None:
    kept = trees()
    kept.add("g", 1, "one", 0, TEXT, 0.0)
    found = kept.find("g", 1, [0, *TEXT[5:9]], 4, 0.0)
    assert found is not None
    assert (found.ids, found.match) == (TEXT[9:13], 4)


def test_other_groups_and_versions_are_not_drafted_from() -> None:
    kept = trees()
    kept.add("g", 1, "one", 0, TEXT, 0.0)
    assert kept.find("h", 1, TEXT[:4], 4, 0.0) is None
    assert kept.find("g", 2, TEXT[:4], 4, 0.0) is None


def test_repeated_tokens_are_learnt_once() -> None:
    kept = trees()
    kept.add("g", 1, "one", 0, TEXT[:10], 0.0)
    kept.add("g", 1, "one", 4, TEXT[4:20], 0.0)
    kept.add("g", 1, "one", 0, TEXT[:7], 0.0)
    assert kept.bytes == 20 * TOKEN_BYTES
    assert kept.known("g", 1, "one") == 20


def test_no_draft_spans_tokens_that_are_missing() -> None:
    kept = trees()
    kept.add("g", 1, "one", 0, TEXT[:10], 0.0)
    kept.add("g", 1, "one", 15, TEXT[15:], 0.0)
    found = kept.find("g", 1, TEXT[4:10], 4, 0.0)
    assert found is None
    assert kept.known("g", 1, "one") == len(TEXT)


def test_memory_is_bounded_and_the_group_used_longest_ago_goes_first() -> None:
    kept = trees(most_tokens=70)
    for number, group in enumerate(["a", "b", "c"]):
        kept.add(group, 1, "one", 0, TEXT, float(number))
        if group == "b":
            kept.find("a", 1, TEXT[:4], 4, 1.5)
    assert kept.bytes <= 70 * TOKEN_BYTES
    assert kept.find("a", 1, TEXT[:4], 4, 3.0) is not None
    assert kept.find("b", 1, TEXT[:4], 4, 3.0) is None


def test_a_group_that_needs_more_than_all_may_have_begins_anew() -> None:
    kept = trees(most_tokens=70)
    for number in range(3):
        kept.add("g", 1, f"r{number}", 0, TEXT, float(number))
        assert kept.bytes <= 70 * TOKEN_BYTES
    assert kept.find("g", 1, TEXT[:4], 4, 3.0) is None
    kept.add("g", 1, "r2", 30, TEXT, 4.0)
    assert kept.find("g", 1, TEXT[:4], 4, 4.0) is not None


def test_memory_is_given_back_when_groups_end_or_idle_and_when_versions_are_replaced() -> None:
    kept = trees()
    for group in ("ended", "idle", "used"):
        kept.add(group, 1, "one", 0, TEXT, 0.0)
    kept.forget(["ended"])
    kept.find("used", 1, TEXT[:4], 4, IDLE_S)
    assert kept.expire(IDLE_S + 1.0) == ["idle"]
    assert (len(kept), kept.bytes) == (1, len(TEXT) * TOKEN_BYTES)
    kept.add("ahead", 2, "one", 0, TEXT, IDLE_S)
    assert kept.replace(2) == ["used"]
    assert kept.find("ahead", 2, TEXT[:4], 4, IDLE_S) is not None
    assert kept.replace(0) == ["ahead"]
    assert (len(kept), kept.bytes) == (0, 0)
