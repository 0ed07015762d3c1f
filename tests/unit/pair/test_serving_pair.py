"""The governor between two simulated engines: what it promises of a whole stretch of traffic."""

import pytest
from msgspec.structs import replace

from benchmarks.pair.virtual.compared_policies import serving_policy
from benchmarks.pair.virtual.pair_costs import PairCosts, PairMemory, StrayProcess
from benchmarks.pair.virtual.rollout_batch import RolloutShape
from benchmarks.pair.virtual.serving_comparison import compared, speed_for_load
from benchmarks.pair.virtual.serving_pair import ServingPair
from benchmarks.pair.virtual.serving_policies import latency_percentile, played_alone, resolved_targets, served_ttft
from ebbtide.demo.coserving.request_traffic import TrafficBursts, TrafficRequest, faster, made_up
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

BESIDE = PairCosts(serving_beside=0.6, rollouts_beside=0.6)
EXACT = PairCosts(noise=0.0, hiccup=0)
#: Both engines hold 4 KiB a token; the rollouts alone could fill the limit.
SCARCE = replace(
    EXACT,
    slots=8,
    step_tokens=32,
    memory=PairMemory(
        limit_mib=28, serving_kv_mib=12, served_token_bytes=4096, rollout_kv_mib=64, rollout_token_bytes=4096
    ),
)
TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.05)


def played(
    name: str, requests: list[TrafficRequest], costs: PairCosts = EXACT, *, seed: int = 0, until: float = 0.0
) -> ServingPair:
    pair = serving_policy(name, costs).play(requests, costs, TARGETS, seed=seed)
    pair.run()
    if until:
        pair.rest(until)
    return pair


@pytest.mark.parametrize("load", [0.2, 0.5])
def test_served_requests_hardly_feel_it_and_idle_time_is_harvested(load: float) -> None:
    requests = made_up(TrafficBursts(prompt=400, output=12), 240.0, seed=1)
    arrivals = faster(requests, speed_for_load(requests, load, BESIDE))
    rows = {row.policy: row for row in compared(arrivals, BESIDE, LatencyTargets(), ["ours", "unguarded"], seed=0)}
    alone, ours, unguarded = rows["alone"], rows["ours"], rows["unguarded"]
    assert ours.requests == alone.requests == len(requests)
    assert ours.ttft_ms[-1] <= max(1.15 * alone.ttft_ms[-1], alone.ttft_ms[-1] + 26)
    assert ours.tpot_ms[-1] <= 1.15 * alone.tpot_ms[-1]
    assert ours.share_of_ideal >= 0.9
    assert ours.ttft_ms[-1] < unguarded.ttft_ms[-1]


@pytest.mark.parametrize("load", [0.2, 0.5])
def test_beside_a_stray_process_as_many_requests_attain_the_slo_as_alone_beside_it(load: float) -> None:
    requests = made_up(TrafficBursts(size=1, prompt=300, output=16), 2400.0, seed=1)
    arrivals = faster(requests, speed_for_load(requests[:100], load, BESIDE))
    targets = resolved_targets(LatencyTargets(), played_alone(arrivals, BESIDE).done)
    disturbed = replace(BESIDE, stray=StrayProcess(least=0.1, most=0.5))
    pair = serving_policy("ours", disturbed).play(arrivals, disturbed, targets, seed=0)
    pair.run()
    alone, ours = (
        sum(one.meets(targets.ttft_s, targets.tpot_s) for one in done) / len(done)
        for done in (played_alone(arrivals, disturbed).done, pair.done)
    )
    assert alone < 1.0, "the process is felt"
    assert ours >= alone - 0.01
    assert pair.harvested > 0


def test_the_same_seed_gives_the_same_history() -> None:
    requests = made_up(TrafficBursts(prompt=400, output=12), 60.0, seed=2)
    first, second = (played("ours", requests, PairCosts(), seed=5) for _ in range(2))
    assert first.harvested == second.harvested > 0
    assert [one.last for one in first.done] == [one.last for one in second.done]
    assert played("ours", requests, PairCosts(), seed=6).harvested != first.harvested


def test_a_request_alone_takes_what_its_work_costs() -> None:
    pair = played_alone([TrafficRequest(1.0, 300, 11)], EXACT)
    (call,) = pair.done
    assert call.ttft_s == pytest.approx(EXACT.prefill(300))
    assert call.tpot_s == pytest.approx(EXACT.decode(1))
    assert pair.busy_s == pytest.approx(EXACT.prefill(300) + 10 * EXACT.decode(1))


def test_rollouts_alone_come_near_the_speed_that_the_costs_allow() -> None:
    pair = played("unguarded", [], until=60.0)
    assert pair.harvested / 60.0 == pytest.approx(EXACT.tokens_per_s, rel=0.05), "prompts are read in between"


def test_a_request_beside_rollouts_goes_on_at_its_part_of_the_speed() -> None:
    beside = played("unguarded", [TrafficRequest(1.0, 300, 101)])
    (call,) = beside.done
    assert call.tpot_s == pytest.approx(EXACT.decode(1) / EXACT.serving_beside, rel=0.1)


def test_a_reclaim_waits_for_one_step() -> None:
    requests = made_up(TrafficBursts(prompt=400, output=12), 120.0, seed=1)
    costs = replace(EXACT, step_tokens=EXACT.slots)
    pair = played("ours", requests, costs)
    step_s = costs.step_s + costs.step_token_s * costs.slots
    assert len(pair.reclaims) > 10
    assert max(pair.reclaims) <= 1.01 * step_s / EXACT.rollouts_beside


def test_idle_time_alone_means_that_no_request_decodes_beside_rollouts() -> None:
    requests = made_up(TrafficBursts(prompt=200, output=40), 120.0, seed=3)
    alone, idle = played_alone(requests, EXACT), played("idle-only", requests)
    slower = [one.tpot_s / two.tpot_s for one, two in zip(idle.done, alone.done, strict=True) if one.made > 1]
    assert latency_percentile(slower, 50.0) == pytest.approx(1.0, abs=0.01)
    assert idle.harvested > 0


def test_a_served_engine_that_is_full_lets_prompts_wait() -> None:
    together = [TrafficRequest(0.0, 2000, 40)] * 3
    free, full = played_alone(together, EXACT), played_alone(together, SCARCE)
    assert max(served_ttft(full.done)) > max(served_ttft(free.done)) + 30 * EXACT.decode(1)


@pytest.mark.parametrize("name", ["ours", "unguarded", "rose:600,1,0.2,0.25"])
def test_rollouts_never_hold_more_memory_than_they_are_allowed(name: str) -> None:
    block = SCARCE.memory.block_tokens * SCARCE.memory.rollout_token_bytes
    requests = made_up(TrafficBursts(prompt=900, output=30), 60.0, seed=4)
    pair = serving_policy(name, SCARCE).play(requests, SCARCE, TARGETS, seed=0, shape=RolloutShape())
    held: list[tuple[int, int]] = []
    pair.stepped = lambda *_: held.append((pair.guard.allowed.kv_bytes, pair.batch.blocks * block))
    pair.run()
    # A step under way when a cut came ends with what it had.
    late = sum(used > allowed for allowed, used in held)
    assert late <= 0.02 * len(held)
    assert max(used for _, used in held) > 0.4 * max(allowed for allowed, _ in held)
    assert pair.batch.reread > 0


def test_rose_aborts_whole_rollouts_and_ours_none() -> None:
    requests = made_up(TrafficBursts(size=12, prompt=900, output=30), 120.0, seed=4)
    rose, ours = (played(name, requests, SCARCE) for name in ("rose:600,0.5,0.2,0.5", "ours"))
    assert rose.batch.wasted > 0
    assert ours.batch.wasted == 0
    assert ours.harvested > rose.harvested


def test_weights_go_away_while_serving_needs_all_memory_and_come_back() -> None:
    memory = replace(SCARCE.memory, limit_mib=12, rollout_kv_mib=12)
    costs = replace(SCARCE, memory=memory, wake_s=2.0)
    pair = serving_policy("ours", costs).play([TrafficRequest(5.0, 2900, 400)], costs, TARGETS, seed=0)
    slept = []
    for second in range(1, 16):
        pair.run(float(second))
        slept.append(pair.asleep)
    pair.run()
    pair.rest(120.0)
    assert any(slept)
    assert (slept[0], pair.asleep) == (False, False)


def test_a_cut_of_memory_takes_effect_at_the_end_of_the_step_under_way() -> None:
    block = SCARCE.memory.block_tokens * SCARCE.memory.rollout_token_bytes
    slow = replace(SCARCE, step_s=0.06)  # a step is nearly always under way when memory is looked at
    burst = made_up(TrafficBursts(size=12, prompt=900, output=30), 30.0, seed=4)
    requests = [TrafficRequest(one.at + 30.0, one.prompt, one.output) for one in burst]  # rollouts hold much by then
    shape = RolloutShape(prompt=600)
    pair = serving_policy("rose:600,0.5,0.2,1", slow).play(requests, slow, TARGETS, seed=0, shape=shape)
    steps_beyond, longest = 0, 0

    def stepped(_began: float, _now: float, _made: int) -> None:
        nonlocal steps_beyond, longest
        steps_beyond = steps_beyond + 1 if pair.batch.blocks * block > pair.guard.allowed.kv_bytes else 0
        longest = max(longest, steps_beyond)

    pair.stepped = stepped
    pair.run()
    assert pair.batch.wasted > 0
    assert longest <= 1
