"""Memory is divided by chunks: reservations fit, nobody waits for ever, and forecasts spare rollouts from parking."""

from random import Random

import pytest
from msgspec.structs import replace

from ebbtide.rollout_worker.generation.chunk_admission import ChunkRules, KvBook, KvContext, divide_memory
from tests.unit.rollout_worker.played_memory import MOST, PlayedMemory, drawn

RULES = ChunkRules(kv_tokens=4096)


def context(key: str, *, tokens: int = 100, since_s: float = 0.0, reserved: int = 0, rest: float = 400.0) -> KvContext:
    return KvContext(key=key, prompt=100, tokens=tokens, most=MOST, since_s=since_s, reserved=reserved, rest=rest)


def blocks(contexts: list[KvContext], block: int = 16) -> int:
    """Counted anew: each prefix once, and beside it each one's own blocks."""
    own = sum(-(-one.reserved // block) - ((one.prompt - 1) // block if one.prefix else 0) for one in contexts)
    return own + sum({one.prefix: (one.prompt - 1) // block for one in contexts if one.prefix}.values())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_reservations_never_exceed_the_memory_and_all_rollouts_end(seed: int, *, known: bool) -> None:
    def look(running: list[KvContext]) -> None:
        assert blocks(running) <= RULES.blocks

    played = PlayedMemory(RULES, drawn(seed, 40, known=known), look)
    played.play()
    assert set(played.order) == {f"r{number}" for number in range(40)}


@pytest.mark.parametrize("seed", range(4))
def test_true_forecasts_let_hardly_anybody_park(seed: int) -> None:
    played = PlayedMemory(RULES, drawn(seed, 40, known=True), lambda _: None)
    played.play()
    assert played.parked <= 1  # of forty: a chunk may be a little too long for what is free


def test_the_book_counts_reservations_of_any_order_exactly() -> None:
    draw, book, held = Random(3), KvBook(RULES), dict[str, KvContext]()
    for number in range(400):
        if held and draw.random() < 0.5:
            book.release(held.pop(draw.choice(sorted(held))))
        else:
            prompt = draw.randint(1, 90)
            one = KvContext(
                key=f"{number}", prompt=prompt, tokens=prompt, most=50, since_s=0.0, prefix=draw.choice(["", "a", "b"])
            )
            book.reserve(one, prompt + draw.randint(1, 50))
            held[one.key] = one
        shared: dict[str, list[int]] = {prefix: [] for prefix in ("a", "b")}
        for one in held.values():
            if one.prefix:
                shared[one.prefix].append(RULES.shared_blocks(one))
        assert len(book) == len(held)
        assert book.free == RULES.blocks - book.used
        assert book.used >= sum(max(found, default=0) for found in shared.values())
    for one in list(held.values()):
        book.release(one)
    assert book.used == 0


def test_a_rollout_that_no_memory_holds_runs_alone() -> None:
    decision = divide_memory([], [context("long", tokens=5000)], RULES)
    assert [key for key, _ in decision.started] == ["long"]


def test_memory_that_shrank_is_given_back_at_once() -> None:
    running = [context(f"r{number}", tokens=600, reserved=640, since_s=float(number)) for number in range(6)]
    decision = divide_memory(running, [], ChunkRules(kv_tokens=2048))
    assert len(decision.parked) == 3
    assert decision.started == ()


def test_a_groups_prompt_is_counted_once() -> None:
    rules = ChunkRules(kv_tokens=2048)
    waiting = [
        KvContext(key=f"r{n}", prompt=1000, tokens=1000, most=100, since_s=0.0, prefix=prefix, rest=50.0)
        for n, prefix in enumerate(["a", "a", "a", "a", "b"])
    ]
    assert [key for key, _ in divide_memory([], waiting, rules).started] == ["r0", "r1", "r2", "r3"]


def test_a_running_rollout_gets_its_next_chunk_before_it_needs_it() -> None:
    decision = divide_memory([context("one", tokens=240, reserved=248)], [], RULES)
    ((key, reserved),) = decision.grown
    assert key == "one"
    assert reserved >= 240 + 2 * RULES.lead
    assert divide_memory([context("one", tokens=200, reserved=248)], [], RULES).grown == ()


def test_no_more_run_than_the_engine_has_slots() -> None:
    decision = divide_memory([], [context(f"r{n}") for n in range(5)], ChunkRules(kv_tokens=65_536, slots=3))
    assert len(decision.started) == 3


def test_a_decision_looks_at_each_running_rollout_a_few_times_however_many_wait() -> None:
    looks = 0

    class Counting(ChunkRules, frozen=True, kw_only=True):
        def likely_rest(self, context: KvContext) -> float:
            nonlocal looks
            looks += 1
            return super().likely_rest(context)

    rules = Counting(kv_tokens=256 * 1024)
    running = [context(f"r{n}", tokens=1000, reserved=1016, rest=500.0 + n) for n in range(256)]
    waiting = [context(f"w{n}", tokens=20_000, rest=1e5) for n in range(64)]
    assert divide_memory(running, waiting, rules).started == ()
    assert looks < 10 * 256


def test_nobody_passes_the_first_one_that_waits() -> None:
    running = [context("old", tokens=2000, reserved=2200)]
    waiting = [context("big", tokens=1500), context("small", since_s=9.0)]
    assert divide_memory(running, waiting, RULES).started == ()
    assert [key for key, _ in divide_memory([], waiting, RULES).started] == ["big", "small"]


def test_growth_that_does_not_fit_parks_the_one_that_came_last() -> None:
    running = [
        context("first", tokens=2040, reserved=2048, since_s=1.0, rest=900.0),
        context("last", tokens=1200, reserved=1296, since_s=3.0),
        context("cheap", tokens=700, reserved=752, since_s=2.0),
    ]
    decision = divide_memory(running, [context("waits")], RULES)
    assert decision.parked == ("last",)
    assert [key for key, _ in decision.grown] == ["first"]
    assert decision.started == (), "nobody starts until it has left"


def test_the_rollout_that_came_first_keeps_its_memory() -> None:
    running = [
        context("first", tokens=200, reserved=256, since_s=1.0),
        context("second", tokens=3832, reserved=3840, since_s=2.0),
    ]
    assert divide_memory(running, [], RULES).parked == ("second",)


def test_a_chunk_has_one_length_and_is_shorter_where_no_more_is_free() -> None:
    rules = ChunkRules(kv_tokens=65_536)
    (_, one), (_, short) = divide_memory([], [context("one"), replace(context("short"), most=50)], rules).started
    assert (one, short) == (100 + rules.chunk, 100 + 50)
    full = [context("old", tokens=60_000, reserved=65_400), context("due", tokens=100, reserved=104, since_s=1.0)]
    assert divide_memory(full, [], rules).grown == (("due", 100 + 2 * rules.lead),)
