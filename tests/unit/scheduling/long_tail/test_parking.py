"""A rollout without memory waits at its engine for a short time, and goes back to the queue for a long one."""

from math import inf

from ebbtide.scheduling.long_tail.chunks.kv_contexts import ChunkRules, KvContext
from ebbtide.scheduling.long_tail.chunks.parking import leaves, wait_tokens

RULES = ChunkRules(kv_tokens=4096)


def context(key: str, *, tokens: int, rest: float, reserved: int = 0) -> KvContext:
    return KvContext(key=key, prompt=100, tokens=tokens, most=4000, since_s=0.0, rest=rest, reserved=reserved)


def test_the_wait_lasts_until_those_that_end_soonest_have_given_enough_memory_back() -> None:
    one = context("one", tokens=1200, rest=500.0)
    running = [
        context("late", tokens=2000, rest=900.0, reserved=2048),
        context("soon", tokens=900, rest=40.0, reserved=960),
        context("then", tokens=900, rest=200.0, reserved=960),
    ]
    assert wait_tokens(one, running, RULES) == 200.0
    assert wait_tokens(one, running[:1], RULES) == 0.0


def test_a_rollout_that_no_memory_holds_has_no_end_of_its_wait() -> None:
    assert wait_tokens(context("one", tokens=5000, rest=1.0), [], RULES) == inf


def test_a_rollout_leaves_only_if_its_wait_is_much_longer_than_its_reading() -> None:
    assert not leaves(0.5, read_s=0.0)
    assert not leaves(6.0, read_s=3.0)
    assert leaves(8.0, read_s=3.0)
    assert leaves(inf, read_s=3.0)
