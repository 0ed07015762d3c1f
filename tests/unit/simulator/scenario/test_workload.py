"""Episodes are drawn from tables, correlations and the seed, whoever asks for them and in whatever order."""

from itertools import pairwise
from math import exp, log
from random import Random
from statistics import NormalDist, correlation, mean, median

import pytest
from msgspec.structs import replace

from ebbtide.simulator.scenario.input_tables import InputTables, QuantileTable
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import MATH_RESPONSES, LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, TrainingRun
from ebbtide.simulator.scenario.workload import Turn, Workload

NUMBER = 4000
#: Kolmogorov's bound at 1 % for so many independent draws.
KS = 1.63 / NUMBER**0.5
TABLES = {
    "quantiles.csv": QuantileTable((0.01, 0.25, 0.5, 0.75, 0.99, 1.0), (40, 300, 800, 1500, 9000, 12000), True),
    "cdf.csv": QuantileTable((0.1, 0.5, 0.95), (100.0, 700.0, 4000.0)),
}


def scenario(run: TrainingRun, *more: TrainingRun) -> Scenario:
    fleet = (MachinePool(name="p", engine="e", workers=1),)
    return Scenario(name="s", hours=1.0, fleet=fleet, run=(run, *more), tables=InputTables(quantiles=TABLES))


def one_run(lengths: LengthSpec = MATH_RESPONSES, **given: object) -> TrainingRun:
    return replace(TrainingRun(name="r", trainer="t", lengths=lengths, prompts=NUMBER), **given)


def lengths(spec: LengthSpec, *, step: int = 0, sample: int = 0, seed: int = 0, **given: object) -> list[int]:
    """One response of each of many prompts."""
    work = Workload(scenario(one_run(spec, **given)), seed)
    return [work.turns("r", step, prompt, sample)[0].response for prompt in range(NUMBER)]


def ks_distance(values: list[int], table: QuantileTable, most: float) -> float:
    """The largest gap between the values' own distribution and the table's, at the table's quantiles."""
    ordered, gaps = sorted(values), []
    for share in (index / 200 for index in range(1, 200)):
        value = table.at(share, most)
        gaps.append(abs(sum(one <= value for one in ordered) / len(ordered) - share))
    return max(gaps)


@pytest.mark.parametrize("name", TABLES)
def test_lengths_have_the_distribution_of_their_table(name: str) -> None:
    assert ks_distance(lengths(LengthSpec(file=name)), TABLES[name], 16_384) < KS


def test_correlation_does_not_change_the_distribution() -> None:
    drawn = lengths(LengthSpec(file="cdf.csv", correlation=0.9), step=3, sample=5)
    assert ks_distance(drawn, TABLES["cdf.csv"], 16_384) < KS


def test_what_a_cdf_leaves_out_lies_below_the_cap() -> None:
    drawn = lengths(LengthSpec(file="cdf.csv"), cap=16_384)
    assert 4000 < max(drawn) <= 16_384
    assert 0.03 < sum(one > 4000 for one in drawn) / NUMBER < 0.07
    assert max(lengths(LengthSpec(file="cdf.csv"), cap=4000)) == 4000


def test_a_log_normal_has_its_median_and_spread() -> None:
    logs = [log(one) for one in lengths(LengthSpec(median=2000, sigma=0.5))]
    normal = NormalDist.from_samples(logs)
    assert normal.mean == pytest.approx(log(2000), abs=0.03)
    assert normal.stdev == pytest.approx(0.5, abs=0.02)


def test_the_default_is_what_the_figure_of_mathematical_responses_shows() -> None:
    drawn = sorted(lengths(MATH_RESPONSES))
    quantiles = [drawn[int(share * NUMBER)] for share in (0.5, 0.75, 0.9, 0.95)]
    assert quantiles == pytest.approx([660, 1120, 2350, 4150], rel=0.12)


@pytest.mark.parametrize("spec", [LengthSpec(mean=4000, sigma=1.0), LengthSpec(mean=2500, file="quantiles.csv")])
def test_a_mean_is_kept_under_the_cap(spec: LengthSpec) -> None:
    assert mean(lengths(spec, cap=8192)) == pytest.approx(spec.mean, rel=0.03)


@pytest.mark.parametrize(("spec", "values"), [(LengthSpec(value=900), {900}), (LengthSpec(low=5, high=7), {5, 6, 7})])
def test_constants_and_uniform_lengths_are_what_they_say(spec: LengthSpec, values: set[int]) -> None:
    assert set(lengths(spec)) == values


@pytest.mark.parametrize("asked", [0.0, 0.4, 0.8])
def test_samples_of_a_prompt_have_the_correlation_that_was_asked(asked: float) -> None:
    spec = LengthSpec(median=1000, sigma=0.4, correlation=asked)
    one, other = ([log(length) for length in lengths(spec, sample=sample)] for sample in (0, 1))
    assert correlation(one, other) == pytest.approx(asked, abs=0.05)


@pytest.mark.parametrize("repeats", [0.0, 0.5, 1.0])
def test_a_prompt_that_comes_back_is_as_hard_as_was_asked(repeats: float) -> None:
    spec = LengthSpec(median=1000, sigma=0.4, correlation=0.9, repeats=repeats)
    work = Workload(scenario(one_run(spec, dataset=NUMBER)), 0)
    epochs: list[dict[int, float]] = [{}, {}]
    for step, found in enumerate(epochs):
        for prompt in range(NUMBER):
            found[work.prompt_id("r", step, prompt)] = log(work.turns("r", step, prompt, 0)[0].response)
    assert epochs[0].keys() == epochs[1].keys() == set(range(NUMBER))
    assert list(epochs[0]) != list(epochs[1])  # in another order
    pairs = [(value, epochs[1][number]) for number, value in epochs[0].items()]
    assert correlation(*zip(*pairs, strict=True)) == pytest.approx(0.9 * repeats, abs=0.05)


def test_a_prompt_keeps_its_tokens_over_epochs() -> None:
    run = one_run(prompts=10, dataset=20, prompt_tokens=QuantitySpec(median=500, sigma=1.0))
    work = Workload(scenario(run), 0)
    seen: dict[int, set[int]] = {}
    for step in range(6):
        for prompt in range(10):
            seen.setdefault(work.prompt_id("r", step, prompt), set()).add(work.turns("r", step, prompt, 0)[0].prompt)
    assert len(seen) == 20
    assert all(len(tokens) == 1 for tokens in seen.values())
    assert len(set.union(*seen.values())) > 15


def agent(**given: object) -> TrainingRun:
    around = SimulatedEnvironment(
        turns=QuantitySpec(low=1, high=6),
        adds_tokens=QuantitySpec(median=300, sigma=0.5),
        wait_s=QuantitySpec(mean=2.0, sigma=1.0, most=60),
        reward_s=QuantitySpec(value=30),
    )
    return replace(one_run(LengthSpec(median=200, sigma=0.8), environment=around), **given)


def test_the_context_grows_by_responses_and_what_the_environment_adds() -> None:
    work, numbers, waits = Workload(scenario(agent()), 0), set(), []
    for prompt in range(300):
        turns = work.turns("r", 0, prompt, 0)
        assert turns[0].prompt == 512
        assert turns[-1].wait_s == 30
        assert all(after.prompt > before.prompt + before.response for before, after in pairwise(turns))
        numbers.add(len(turns))
        waits += [turn.wait_s for turn in turns[:-1]]
    assert numbers == {1, 2, 3, 4, 5, 6}
    assert max(waits) <= 60
    assert mean(waits) == pytest.approx(2.0, rel=0.2)


def test_an_episode_ends_where_its_context_is_full() -> None:
    work = Workload(scenario(agent(context=1500)), 0)
    episodes = [work.turns("r", 0, prompt, 0) for prompt in range(200)]
    assert max(turns[-1].prompt + turns[-1].response for turns in episodes) == 1500
    assert median(len(turns) for turns in episodes) < 3


def test_draws_depend_on_nothing_but_seed_run_step_prompt_and_sample() -> None:
    places = [
        (run, step, prompt, sample) for run in "rx" for step in (0, 7) for prompt in range(9) for sample in (0, 3)
    ]
    runs = (agent(dataset=5000), replace(agent(), name="x"))

    def drawn(
        order: list[tuple[str, int, int, int]], *of: TrainingRun, seed: int = 0
    ) -> dict[object, tuple[Turn, ...]]:
        work = Workload(scenario(*of), seed)
        return {place: work.turns(*place) for place in order}

    shuffled = Random(0).sample(places, len(places))
    all_turns = drawn(places, *runs)
    assert drawn(shuffled, *runs) == all_turns
    assert drawn(shuffled, *reversed(runs)) == all_turns
    alone = [place for place in places if place[0] == "x"]
    assert drawn(alone, runs[1]).items() <= all_turns.items()
    assert drawn(places, *runs, seed=1) != all_turns
    waiting = replace(runs[1], environment=replace(runs[1].environment, reward_s=QuantitySpec(value=60)))
    lengths_of = [[(turn.prompt, turn.response) for turn in turns] for turns in drawn(alone, waiting).values()]
    assert lengths_of == [[(turn.prompt, turn.response) for turn in all_turns[place]] for place in alone]


def test_a_tail_is_heavier_above_its_begin_alone() -> None:
    plain = lengths(LengthSpec(median=500, sigma=0.5), cap=1 << 20)
    tailed = lengths(LengthSpec(median=500, sigma=0.5, tail_sigma=1.0, tail_from=1.0), cap=1 << 20)
    begin = 500 * exp(0.5)
    pairs = list(zip(plain, tailed, strict=True))
    assert all(one == other for one, other in pairs if one < begin - 1)
    assert all(other > one for one, other in pairs if one > begin + 30)


def test_endless_responses_run_into_any_cap_and_the_others_keep_their_lengths() -> None:
    plain = LengthSpec(median=500, sigma=0.5, correlation=0.2)
    for cap in (20_000, 80_000):
        found = lengths(replace(plain, endless=0.05), cap=cap)
        assert found.count(cap) / NUMBER == pytest.approx(0.05, abs=0.02)
        assert [one for one in found if one < cap] == [
            length for length, one in zip(lengths(plain, cap=cap), found, strict=True) if one < cap
        ]
