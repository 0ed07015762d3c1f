"""How much rollout work may run beside served requests."""

from ebbtide.scheduling.governor import Governor, Limits, Targets


def governor() -> Governor:
    return Governor(Targets(ttft_s=1.0, tpot_s=0.1), Limits())


def test_an_arrival_takes_everything_back_at_once() -> None:
    decides = governor()
    assert decides.decide(0.0).budget.tokens
    decides.arrived(1.0, "a", 100)
    assert decides.decide(1.0).budget.tokens == 0


def test_the_budget_comes_back_after_a_quiet_time() -> None:
    decides = governor()
    decides.arrived(1.0, "a", 100)
    decides.produced(1.1, "a", 1)
    decides.ended(1.2, "a", True)
    decision = decides.decide(1.2)
    assert (decision.state, decision.budget.tokens) == ("quiet", 0)
    assert decides.decide(decision.review_at).budget.tokens
