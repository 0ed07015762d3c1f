"""Defines the commands of the demos."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FixedMachines(StrEnum):
    """Machines of the fixed pool of `demo-elastic`: always there, or those of the trace."""

    RESERVED = "reserved"
    SPOT = "spot"


def register(app: typer.Typer) -> None:
    panel = "This machine"
    app.command(rich_help_panel=panel)(demo)
    app.command("demo-agent", rich_help_panel=panel)(demo_agent)
    app.command("demo-coserving", rich_help_panel=panel)(demo_coserving)
    app.command("demo-elastic", rich_help_panel=panel)(demo_elastic)


def demo(
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of problems, base model and permutations.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="vLLM workers.")] = 2,
    run_dir: Annotated[Path, typer.Option(help="Folder for the report, logs and checkpoints.")] = Path("runs/demo"),
    cache: Annotated[Path, typer.Option(help="Folder of base models.")] = Path(".cache/base-models"),
    spec: Annotated[Path | None, typer.Option(help="Spec of the run (TOML), instead of the demo's own.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sampling top_p.")] = None,
    eval_problems: Annotated[int | None, typer.Option(min=0, help="Problems of each evaluation.")] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Permute rewards within each group, so that nothing can be learnt.")
    ] = False,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Train on groups as they end, with one update of each step, not four.")
    ] = False,
    kill: Annotated[bool, typer.Option(help="Kill a worker in the middle of its responses.")] = True,
    kill_coordinator: Annotated[bool, typer.Option("--kill-coordinator", help="Kill the coordinator too.")] = False,
    kill_trainer: Annotated[bool, typer.Option("--kill-trainer", help="Kill the trainer too.")] = False,
) -> None:
    """Train a policy with GRPO on vLLM workers, kill one of them midway, and report the result."""
    from ebbtide.demo.demo import DemoOptions, run

    options = DemoOptions(
        run_dir=run_dir,
        cache=cache,
        spec=spec,
        seed=seed,
        steps=steps,
        workers=workers,
        temperature=temperature,
        top_p=top_p,
        eval_problems=eval_problems,
        control=control,
        streaming=streaming,
        kill_worker=kill,
        kill_coordinator=kill_coordinator,
        kill_trainer=kill_trainer,
    )
    raise typer.Exit(run(options))


def demo_agent(
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of problems and permutations.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="vLLM workers.")] = 2,
    run_dir: Annotated[Path, typer.Option(help="Folder for the report and logs.")] = Path("runs/demo-agent"),
    cache: Annotated[Path, typer.Option(help="Folder of base models.")] = Path(".cache/base-models"),
    control: Annotated[
        bool, typer.Option("--control", help="Permute rewards within each group, so that nothing can be learnt.")
    ] = False,
    kill: Annotated[bool, typer.Option(help="Kill a worker in the middle of its completions.")] = True,
) -> None:
    """Train an agent that calls a tool through a gateway, kill a worker midway, and report the result."""
    from ebbtide.demo.agents.agent_demo import AgentDemoOptions, run

    options = AgentDemoOptions(
        run_dir=run_dir, cache=cache, seed=seed, steps=steps, workers=workers, control=control, kill_worker=kill
    )
    raise typer.Exit(run(options))


def demo_coserving(
    trace: Annotated[
        Path | None,
        typer.Option(help="Request trace to replay: CSV with t_s,input_tokens,output_tokens. None: made-up bursts."),
    ] = None,
    window: Annotated[str, typer.Option(metavar="START:END", help="Seconds of the trace.")] = "0:45",
    speed: Annotated[float, typer.Option(min=0.001, help="Factor on the trace's pace.")] = 1.0,
    prompts: Annotated[float, typer.Option(min=0.001, help="Factor on the trace's prompt lengths.")] = 0.25,
    outputs: Annotated[float, typer.Option(min=0.001, help="Factor on the trace's answer lengths.")] = 0.5,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of the run.")] = 16,
    eval_problems: Annotated[int, typer.Option(min=0, help="Problems of each evaluation.")] = 160,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of problems, base model and made-up traffic.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder for the report and logs.")] = Path("runs/demo-coserving"),
    cache: Annotated[Path, typer.Option(help="Folder of models.")] = Path(".cache/base-models"),
) -> None:
    """Serve a model under replayed traffic while a training run borrows its idle time, and report both."""
    from ebbtide.demo.coserving.coserving_demo import run
    from ebbtide.demo.coserving.coserving_options import CoservingOptions

    options = CoservingOptions(
        run_dir=run_dir,
        cache=cache,
        seed=seed,
        steps=steps,
        eval_problems=eval_problems,
        trace=trace,
        window=window,
        speed=speed,
        prompts=prompts,
        outputs=outputs,
    )
    raise typer.Exit(run(options))


def demo_elastic(
    trace: Annotated[
        Path | None,
        typer.Option(help="Spot trace: CSV with t_s,event,node or t_s,count. None: a made-up one."),
    ] = None,
    window: Annotated[str, typer.Option(metavar="START:END", help="Seconds of the trace. Empty: all of it.")] = "",
    speed: Annotated[float, typer.Option(min=0.001, help="Seconds of the trace that pass in one.")] = 60.0,
    share: Annotated[float, typer.Option(min=0.001, max=1, help="Share of the trace's machines.")] = 1.0,
    notice_s: Annotated[
        float, typer.Option(min=0, help="Seconds between a loss's notice and the loss. 0: none.")
    ] = 2.0,
    fixed: Annotated[FixedMachines, typer.Option(help="Machines of the fixed pool.")] = FixedMachines.RESERVED,
    reserved_price: Annotated[float, typer.Option(min=0, help="Assumed, of a reserved machine per hour.")] = 10.47,
    spot_price: Annotated[float, typer.Option(min=0, help="Assumed, of a spot machine per hour.")] = 2.66,
    spec: Annotated[Path | None, typer.Option(help="Spec of the run (TOML), instead of the demo's own.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimiser steps of each run.")] = 14,
    eval_problems: Annotated[int, typer.Option(min=0, help="Problems of each evaluation. 0: no evaluation.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of problems, base model and drawn machines.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder for the report and logs.")] = Path("runs/demo-elastic"),
    cache: Annotated[Path, typer.Option(help="Folder of base models.")] = Path(".cache/base-models"),
) -> None:
    """Train with a trainer that generates between its steps while spot workers come and go, beside a fixed pool."""
    from ebbtide.demo.elastic.elastic_demo import run
    from ebbtide.demo.elastic.elastic_options import ElasticOptions

    options = ElasticOptions(
        run_dir=run_dir,
        cache=cache,
        spec=spec,
        seed=seed,
        steps=steps,
        eval_problems=eval_problems,
        trace=trace,
        window=window,
        speed=speed,
        share=share,
        notice_s=notice_s,
        fixed=fixed.value,
        reserved_price=reserved_price,
        spot_price=spot_price,
    )
    raise typer.Exit(run(options))
