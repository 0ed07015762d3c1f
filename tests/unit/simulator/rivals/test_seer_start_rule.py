"""Seer's picks are the published ones: probes by what they made, then the group that is taken to be the longest."""

from benchmarks.rivals.seer_start_rule import BufferedRequest, SeerStartRule


def test_the_probe_that_made_the_fewest_tokens_is_picked_first() -> None:
    rule = SeerStartRule(cap=1_000)
    waiting = [BufferedRequest(0, 0, 300, True), BufferedRequest(8, 1, 100, True), BufferedRequest(1, 0, 0, False)]
    assert rule.pick(waiting).place == 8


def test_without_probes_a_group_is_as_long_as_its_longest_finished_member() -> None:
    rule = SeerStartRule(cap=1_000)
    for group, tokens in ((0, 50), (0, 300), (1, 200)):
        rule.finished(group, tokens)
    waiting = [BufferedRequest(9, 1, 0, False), BufferedRequest(1, 0, 0, False)]
    assert rule.pick(waiting).group == 0


def test_a_group_without_a_finished_member_is_taken_to_reach_the_cap() -> None:
    rule = SeerStartRule(cap=1_000)
    rule.finished(0, 900)
    assert rule.pick([BufferedRequest(1, 0, 0, False), BufferedRequest(9, 1, 0, False)]).group == 1
