"""Simulates two runs on one fleet whose steps have tails, and tells what the workers that a tail frees bring.

`shared`: workers go over between the runs by their shares, as live. `halves`: no run ever has more than half of the
fleet, so what a tail frees stays idle. The link to the relay varies what a change of run costs.
"""

from collections.abc import Callable
from statistics import mean
from typing import Any, Final

from benchmarks.log_level import errors_only
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import LengthSpec
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.simulate import simulate
from ebbtide.types.run import ShareSpec

#: Of a worker: a 14B model arrives in 5 s, in half a minute, in two minutes.
_LINKS_GBPS: Final = (200.0, 10.0, 2.0)
_WORKERS, _STEPS = 6, 5


def freed_part(tell: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """By link: tokens of ended rollouts a second, and seconds of each run's steps, shared and in halves."""
    errors_only()
    found: dict[str, Any] = {}
    for gbps in _LINKS_GBPS[:1] if quick else _LINKS_GBPS:
        ways = {
            way: _figures([simulate(_scenario(gbps, ceiling), seed=seed) for seed in range(1 if quick else 5)])
            for way, ceiling in (("shared", None), ("halves", 0.5))
        }
        gain = ways["shared"]["tokens_per_s"] / ways["halves"]["tokens_per_s"]
        found[f"{gbps:g}"] = ways | {"shared_over_halves": gain}
        told = "; ".join(
            f"{way} {one['tokens_per_s']:,.0f} tokens/s, steps {one['first_step_s']:.0f}, {one['other_step_s']:.0f} s,"
            f" {one['installing_share']:.1%} of the time installing"
            for way, one in ways.items()
        )
        tell(f"freed workers, {gbps:g} Gbit/s: {told}; shared over halves {gain:.3f}")
    return {"figures": {}, "links_gbps": found}


def _figures(outcomes: list[Outcome]) -> dict[str, float]:
    steps = [step for one in outcomes for step in one.steps]
    pools = [pool for one in outcomes for pool in one.pools if pool.pool == "reserved"]
    return {
        "tokens_per_s": mean(one.tokens.kept / one.simulated_s for one in outcomes),
        **{f"{run}_step_s": mean(one.trained_s - one.opened_s for one in steps if one.run == run) for run in _STARTS},
        "installs": mean(one.installs for one in outcomes),
        "installing_share": sum(one.installing_s for one in pools) / sum(one.machine_s for one in pools),
        "reread_per_token": sum(one.tokens.reread for one in outcomes) / sum(one.tokens.kept for one in outcomes),
    }


#: Run -> when it begins: half of a step apart.
_STARTS: Final = {"first": 0.0, "other": 60.0}


def _scenario(gbps: float, ceiling: float | None) -> Scenario:
    runs = tuple(
        TrainingRun(
            name=name,
            trainer="h100x8-qwen3-14b",
            prompts=96,
            lengths=LengthSpec(mean=1200, sigma=1.1, correlation=0.5),
            steps=_STEPS,
            start_s=start_s,
            share=ShareSpec(ceiling=ceiling),
        )
        for name, start_s in _STARTS.items()
    )
    pool = MachinePool(name="reserved", engine="h100x2-qwen3-14b", workers=_WORKERS, slots=64, link_gbps=gbps)
    return Scenario(name="two runs", fleet=(pool,), run=runs)
