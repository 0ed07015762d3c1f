"""How much routing turn by turn gains over simple rules and over ROSE's, on a modelled fleet.

    python -m benchmarks.turn_routing [--quick] [--seeds N] [--out PATH]

Eight like workers serve sessions of two to six turns. Of all tokens 80 % are prompt, and 80 % of these repeat earlier
turns of the session. An engine reads prompts 8 times as fast as it decodes with all its sequences, and its cache holds
all sessions. Every policy plays the same sessions; of each the best of its settings counts.

Prints tables and writes a JSON file with `figures`: means over the seeds of the ratio of the same seed's figures.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.turn_routing.routed_fleet import TrialSetting, speeds
from benchmarks.turn_routing.routed_trials import (
    BASE,
    LOSSES,
    SWEEP,
    Played,
    Tell,
    TunedPolicy,
    hits_ratio,
    play,
    throughput_ratio,
    tuned,
)

_SEEDS: Final = 5
_QUICK_SEEDS: Final = 5


def compare(seeds: Sequence[int], tell: Tell, *, quick: bool) -> dict[str, Any]:
    """All figures, and what they follow from."""
    tell("base setting: 400 sessions, answers after 5 s")
    best, tried = tuned(BASE, seeds, tell)
    policies = [played.policy for played in best.values()]
    told = {"base": _compared(best), "tried": msgspec.to_builtins(tried), "sweep": {}}
    for what, setting in {} if quick else SWEEP.items():
        tell(what)
        told["sweep"][what] = _compared(_played(policies, setting, seeds[:2], tell))
    tell("4 losses an hour")
    as_published = TunedPolicy(
        name="rose_turns", slots=256, params={**best["rose_turns"].policy.params, "keeps": False}
    )
    lost = _played(policies, LOSSES, seeds[: 1 if quick else 3], tell)
    told["losses"] = _compared(lost)
    restarts = play(as_published, LOSSES, seeds[: 1 if quick else 3], tell)
    told["losses"]["throughput_over_rose_rule_that_restarts"] = throughput_ratio(lost["ebbtide"], restarts)
    return {"figures": _figures(told), **told}


def _played(
    policies: Sequence[TunedPolicy], setting: TrialSetting, seeds: Sequence[int], tell: Tell
) -> dict[str, Played]:
    return {policy.name: play(policy, setting, seeds, tell) for policy in policies}


def _compared(played: dict[str, Played]) -> dict[str, Any]:
    ours = played["ebbtide"]
    return {
        "throughput_over_least_loaded": throughput_ratio(ours, played["least_loaded"]),
        "throughput_over_rose_rule": throughput_ratio(ours, played["rose_turns"]),
        "throughput_over_sticky": throughput_ratio(ours, played["sticky"]),
        "prefix_hits_over_sticky": hits_ratio(ours, played["sticky"]),
        "played": msgspec.to_builtins(list(played.values())),
    }


def _figures(told: dict[str, Any]) -> dict[str, float]:
    names = ("throughput_over_least_loaded", "throughput_over_rose_rule", "prefix_hits_over_sticky")
    base = {name: told["base"][name].mean for name in names}
    return base | {f"{name}_with_losses": told["losses"][name].mean for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turn_routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_SEEDS} seeds, no sweep, one seed with losses")
    parser.add_argument("--seeds", type=arguments.count, default=0, help=f"default: {_SEEDS}")
    parser.add_argument("--out", type=arguments.output)
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("turn_routing", quick=options.quick)
    under = conditions() | {"quick": options.quick}
    seeds = range(options.seeds or (_QUICK_SEEDS if options.quick else _SEEDS))
    prefill, decode = speeds()
    print(f"an engine reads {prefill:,.0f} tokens/s, and decodes {decode:,.0f} ({prefill / decode:.2f} times)")
    told = compare(seeds, partial(print, flush=True), quick=options.quick)
    told |= {"engine": {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}, "conditions": under}
    options.out.write_text(json.dumps(msgspec.to_builtins(told), indent=2, allow_nan=False) + "\n")
    for name, value in told["figures"].items():
        print(f"{name:<44} {value:.4f}")
    print(f"All of it is in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
