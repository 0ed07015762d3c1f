"""States a measured setting as a scenario: its fleet, the lengths of its responses, and what befell its workers."""

from collections import defaultdict
from pathlib import Path
from typing import Final

from benchmarks.simulator.bound_fleet import FLUSH_INTERVAL_MS, FLUSH_TOKENS
from benchmarks.simulator.fitted_profiles import fitted_trainer, version_bytes
from benchmarks.simulator.fitting_inputs import cluster_delays
from benchmarks.simulator.measured import Measured, MeasuredInterruption
from benchmarks.simulator.random_policy import CONTEXT
from benchmarks.simulator.real_settings import RealSession
from benchmarks.simulator.served_pool import GRANTS, granted, users_record
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import write_profile
from ebbtide.simulator.scenario.input_tables import GrantTape, InputTables, KnownTurn, KnownTurns
from ebbtide.simulator.scenario.machine_pool import GrantTapeSpec, MachinePool
from ebbtide.simulator.scenario.quantity_spec import QuantitySpec
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun

#: No setting takes as long. A simulation that does not end is a failure.
_HOURS: Final = 6.0
_RUN: Final = "real"


def real_scenario(measured: Measured, session: RealSession, engine: EngineProfile, folder: Path) -> Scenario:
    """Writes the fitted profiles to `folder` and returns the scenario, whose paths start there."""
    setting = measured.setting
    write_profile(engine, folder / "engine.toml")
    write_profile(fitted_trainer(session), folder / "trainer.toml")
    run = TrainingRun(
        name=_RUN,
        prompts=setting.prompts,
        group=setting.group,
        max_staleness=setting.max_staleness,
        prompt_tokens=QuantitySpec(value=setting.prompt_tokens),
        cap=setting.cap,
        context=CONTEXT,
        trainer="trainer.toml",
        checkpoint_every=0,
    )
    return Scenario(
        name=setting.name,
        hours=_HOURS,
        steps=setting.steps,
        fleet=(*_pools(measured, session),),
        run=(run,),
        fault=tuple(_fault(one) for one in measured.interruptions if one.kind != "join"),
        folder=str(folder),
        tables=InputTables(known={_RUN: known_lengths(measured)}, grants=_grants(measured, engine)),
    )


def _grants(measured: Measured, engine: EngineProfile) -> dict[str, GrantTape]:
    """What users leave a borrowed worker; nothing without any."""
    if not measured.setting.served:
        return {}
    made = sum(one.tokens for one in measured.responses) / len(measured.responses)
    return {GRANTS: granted(users_record(measured), engine, measured.setting.prompt_tokens + made / 2)}


def known_lengths(measured: Measured) -> KnownTurns:
    """Returns the responses as they were, by step, prompt and sample."""
    steps: dict[int, dict[int, list[KnownTurn]]] = defaultdict(lambda: defaultdict(list))
    for one in measured.responses:
        steps[one.step][one.prompt].append(KnownTurn(measured.setting.prompt_tokens, one.tokens, 0.0))
    return KnownTurns(
        steps=tuple(tuple(tuple((turn,) for turn in turns) for turns in groups.values()) for groups in steps.values())
    )


def _pools(measured: Measured, session: RealSession) -> list[MachinePool]:
    """The workers that are there from the begin, and a pool for each that joins."""
    setting, opened = measured.setting, {step.step: step.opened_s for step in measured.steps}
    begin_s = measured.steps[0].opened_s
    joins = [opened[one.step] - begin_s + one.after_s for one in measured.interruptions if one.kind == "join"]
    counted = [("first", setting.workers, 0.0), *((f"join{number}", 1, at) for number, at in enumerate(joins))]
    return [
        MachinePool(
            name=name,
            kind="borrowed" if setting.served else "reserved",
            engine="engine.toml",
            workers=workers,
            from_s=from_s,
            slots=setting.slots,
            boot_s=0.0,
            link_gbps=pull_gbps(session),
            flush_s=FLUSH_INTERVAL_MS / 1000,
            flush_tokens=FLUSH_TOKENS,
            grants=GrantTapeSpec(file=GRANTS, alike=True) if setting.served else None,
        )
        for name, workers, from_s in counted
    ]


def pull_gbps(session: RealSession) -> float:
    """The link at which a patch takes as long as the blocks' pulls did, with all delays of a pull."""
    _, sent = version_bytes(session)
    return 8e-9 * sent / cluster_delays(session.blocks).pull_s


def _fault(one: MeasuredInterruption) -> PlannedFault:
    if one.kind == "kill":
        return PlannedFault(kind="crash", step=one.step, at_s=one.after_s, back_s=one.back_s)
    gone_s, back_s = one.gone_s or 0.0, one.back_s or 0.0
    return PlannedFault(kind="drain", step=one.step, at_s=one.after_s, for_s=gone_s, back_s=max(0.0, back_s - gone_s))
