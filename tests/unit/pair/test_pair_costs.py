"""Costs of a pair: what a profile keeps, and what a fit finds again."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.pair.virtual.pair_costs import (
    CostResidual,
    PairCosts,
    PairMemory,
    StrayProcess,
    pair_costs_text,
    read_pair_costs,
)
from benchmarks.pair.virtual.pair_costs_fit import (
    MeasuredRequest,
    StepSample,
    fit_rollout_steps,
    fit_served,
    residuals,
)
from benchmarks.pair.virtual.serving_policies import played_alone
from ebbtide.demo.coserving.request_traffic import TrafficBursts, made_up
from ebbtide.errors import InvalidRequest

TRUE = PairCosts(prefill_s=0.02, prefill_token_s=0.0004, decode_s=0.02, decode_each_s=0.003, noise=0.05, hiccup=500)
#: What a fit begins with.
UNKNOWN = PairCosts(prefill_s=1.0, prefill_token_s=0.0, decode_s=1.0, decode_each_s=0.0)


def measured(costs: PairCosts, seconds: float = 600.0, blocks: int = 2) -> list[list[MeasuredRequest]]:
    """What clients of an engine with these costs would see."""
    found = []
    for number in range(blocks):
        requests = made_up(TrafficBursts(prompt=300, output=16), seconds / blocks, seed=number)
        pair = played_alone(requests, costs, seed=number)
        calls = sorted(pair.done, key=lambda one: one.asked.at)
        found.append([MeasuredRequest(one.asked.at, one.first, one.last, one.asked.prompt, one.made) for one in calls])
    return found


def test_a_fit_finds_the_costs_of_a_served_engine_again() -> None:
    fitted = fit_served(measured(TRUE), UNKNOWN)
    assert fitted.prefill(300) == pytest.approx(TRUE.prefill(300), rel=0.05)
    assert fitted.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.1)
    assert fitted.decode(1) == pytest.approx(TRUE.decode(1), rel=0.05)
    assert fitted.decode(4) == pytest.approx(TRUE.decode(4), rel=0.15)
    assert fitted.noise == pytest.approx(TRUE.noise, abs=0.02)


def test_residuals_tell_how_far_the_model_is_from_what_was_measured() -> None:
    blocks = measured(TRUE)
    good = {one.figure: one.error for one in fit_served(blocks, UNKNOWN).residuals}
    assert set(good) == {f"{name}_p{at}_ms" for name in ("ttft", "tpot") for at in (50, 95, 99)} | {"busy_s"}
    assert all(abs(error) < 0.15 for error in good.values())
    slow = {one.figure: one.error for one in residuals(blocks, replace(TRUE, decode_s=2 * TRUE.decode_s))}
    assert slow["tpot_p50_ms"] > 0.5


def test_a_fit_finds_the_costs_of_rollout_steps_again() -> None:
    samples = [StepSample(8, tokens, 8 * 0.004 + 0.0001 * tokens) for tokens in (64, 64, 80, 128, 64)]
    step_s, token_s = fit_rollout_steps(samples)
    assert step_s == pytest.approx(0.004)
    assert token_s == pytest.approx(0.0001)


def test_no_cost_of_a_fit_is_negative() -> None:
    # Larger steps were faster: their tokens cost nothing, then.
    assert fit_rollout_steps([StepSample(8, 64, 0.040), StepSample(8, 128, 0.030)])[1] == 0.0
    assert fit_rollout_steps([StepSample(8, 64, 0.0064), StepSample(8, 128, 0.0130)])[0] > 0.0


@pytest.mark.parametrize("blocks", [[], [[]], measured(TRUE, seconds=2.0, blocks=1)])
def test_too_few_requests_are_no_fit(blocks: list[list[MeasuredRequest]]) -> None:
    with pytest.raises(InvalidRequest, match="at least 20 requests"):
        fit_served(blocks, UNKNOWN)


def test_no_steps_are_no_fit() -> None:
    with pytest.raises(InvalidRequest, match="rollout steps"):
        fit_rollout_steps([StepSample(0, 0, 0.0)])


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    costs = replace(
        TRUE,
        source='a "pair"\nof two engines',
        memory=PairMemory(limit_mib=28, served_token_bytes=4096, rollout_kv_mib=64, rollout_token_bytes=4096),
        stray=StrayProcess(least=0.1, most=0.5),
        residuals=(CostResidual(figure="ttft_p99_ms", measured=100.5, modelled=1e-7, requests=300),),
    )
    path = tmp_path / "pair.json"
    path.write_text(pair_costs_text(costs))
    assert read_pair_costs(path) == costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prefill_s": -1.0}', "prefill_s"),
        ('{"prefill_s": 0.0}', "prefill_s"),
        ('{"noise": 3.0}', "noise"),
        ('{"serving_beside": 1.5}', "serving_beside"),
        ('{"slots": 0}', "slots"),
        ('{"speed": 1}', "speed"),
        ('{"memory": {"limit_mib": 10}}', "memory.limit_mib"),
        ('{"stray": {"least": 0.5, "most": 0.1}}', "stray.most"),
        ('{"stray": {"most": 0.1, "burst_s": 0.0}}', "stray.spell_s, burst_s"),
        ('{"stray": {"most": 1.0}}', "most"),
        ('{"prefill_s": ', "truncated"),
        ('{"source": "\udc80"}', "cannot be read"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_by_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pair.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_pair_costs(path)
    assert str(path) in str(refused.value)


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no\.json"):
        read_pair_costs(tmp_path / "no.json")
