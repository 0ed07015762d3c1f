"""Defines `ebbtide demo`: the first demo, which has no name, and the others by name."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ebbtide.cli.commands.up import GPUS_HELP
from ebbtide.errors import InvalidRequest


class FixedMachines(StrEnum):
    """Machines of the fixed pool of `demo elastic`: always there, or those of the trace."""

    RESERVED = "reserved"
    SPOT = "spot"


# Options that several demos have.
Workers = Annotated[int, typer.Option(min=1, help="Number of vLLM workers.")]
Gpus = Annotated[str, typer.Option(help=GPUS_HELP)]
RunDir = Annotated[Path, typer.Option(help="Folder for the report, logs and checkpoints.")]
Cache = Annotated[Path, typer.Option(help="Folder of base models.")]
Spec = Annotated[Path | None, typer.Option(help="Spec of the run, a TOML file, in place of the demo's own.")]
Control = Annotated[
    bool,
    typer.Option("--control", help="Permute rewards within each group as a control, so that nothing can be learnt."),
]
Kill = Annotated[bool, typer.Option(help="Kill a worker while it generates.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Seconds of the trace that pass in one second.")]
_CACHE: Final = Path(".cache/base-models")
_EVALUATION: Final = typer.Option(min=0, help="Number of problems of each evaluation; 0 skips evaluations.")


def _seed(of: str) -> Any:
    return typer.Option(min=0, help=f"Seed of {of}.")


def _steps(least: int = 1) -> Any:
    return typer.Option(min=least, help="Number of optimiser steps of a run.")


demos = typer.Typer(invoke_without_command=True)


def register(app: typer.Typer) -> None:
    app.add_typer(demos, name="demo", rich_help_panel="Demos and simulation")


@demos.callback()
def demo(
    context: typer.Context,
    seed: Annotated[int | None, _seed("problems, base model and permutations")] = None,
    steps: Annotated[int | None, _steps()] = None,
    workers: Workers = 2,
    gpus: Gpus = "",
    run_dir: RunDir = Path("runs/demo"),
    cache: Cache = _CACHE,
    spec: Spec = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sampling top_p.")] = None,
    eval_problems: Annotated[int | None, _EVALUATION] = None,
    control: Control = False,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Train on groups as they complete, with one update a step in place of four."),
    ] = False,
    kill: Kill = True,
    kill_coordinator: Annotated[bool, typer.Option("--kill-coordinator", help="Kill the coordinator as well.")] = False,
    kill_trainer: Annotated[bool, typer.Option("--kill-trainer", help="Kill the trainer as well.")] = False,
) -> None:
    """Train a small policy with GRPO on vLLM workers, kill one of them midway, and report the result.

    The demos below show an agent, co-serving and an elastic pool.
    Each has its own options, which follow its name.
    """
    if context.invoked_subcommand:
        _refuse_misplaced(context)
        return
    from ebbtide.demo.demo import DemoOptions, run

    options = DemoOptions(
        run_dir=run_dir,
        cache=cache,
        gpus=gpus,
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


def _refuse_misplaced(context: typer.Context) -> None:
    """Raises `InvalidRequest` for an option before the name of a demo, which would be that of the first demo."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name != "DEFAULT":
            told = f"comes before {context.invoked_subcommand}; options of a demo follow its name"
            raise InvalidRequest(told, field=option.opts[0])


@demos.command("agent")
def demo_agent(
    seed: Annotated[int | None, _seed("problems and permutations")] = None,
    steps: Annotated[int | None, _steps()] = None,
    workers: Workers = 2,
    gpus: Gpus = "",
    run_dir: RunDir = Path("runs/demo-agent"),
    cache: Cache = _CACHE,
    control: Control = False,
    kill: Kill = True,
) -> None:
    """Train an agent that calls a tool through a gateway, kill a worker midway, and report the result."""
    from ebbtide.demo.agents.agent_demo import AgentDemoOptions, run

    options = AgentDemoOptions(
        run_dir=run_dir,
        cache=cache,
        gpus=gpus,
        seed=seed,
        steps=steps,
        workers=workers,
        control=control,
        kill_worker=kill,
    )
    raise typer.Exit(run(options))


@demos.command("coserving")
def demo_coserving(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Request trace to replay, a CSV file with t_s,input_tokens,output_tokens; synthetic bursts by default."
        ),
    ] = None,
    window: Annotated[str, typer.Option(metavar="START:END", help="Part of the trace to replay, in seconds.")] = "0:45",
    speed: Speed = 1.0,
    prompts: Annotated[float, typer.Option(min=0.001, help="Multiplies the prompt lengths of the trace.")] = 0.25,
    outputs: Annotated[float, typer.Option(min=0.001, help="Multiplies the response lengths of the trace.")] = 0.5,
    steps: Annotated[int, _steps()] = 16,
    eval_problems: Annotated[int, _EVALUATION] = 160,
    seed: Annotated[int | None, _seed("problems, base model and synthetic traffic")] = None,
    gpus: Gpus = "",
    run_dir: RunDir = Path("runs/demo-coserving"),
    cache: Cache = _CACHE,
) -> None:
    """Serve a model under replayed traffic while a run borrows its idle time, and report on both."""
    from ebbtide.demo.coserving.coserving_demo import run
    from ebbtide.demo.coserving.coserving_options import CoservingOptions

    options = CoservingOptions(
        run_dir=run_dir,
        cache=cache,
        gpus=gpus,
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


@demos.command("elastic")
def demo_elastic(
    trace: Annotated[
        Path | None,
        typer.Option(help="Spot trace, a CSV file with t_s,event,node or t_s,count; a synthetic one by default."),
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="START:END", help="Part of the trace to replay, in seconds; all of it by default.")
    ] = "",
    speed: Speed = 60.0,
    share: Annotated[float, typer.Option(min=0.001, max=1, help="Share of the machines of the trace.")] = 1.0,
    notice_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds between the notice of a preemption and the preemption; 0 gives no notice."),
    ] = 2.0,
    fixed: Annotated[FixedMachines, typer.Option(help="Machines of the fixed pool.")] = FixedMachines.RESERVED,
    reserved_price: Annotated[float, typer.Option(min=0, help="Assumed price of a reserved machine per hour.")] = 10.47,
    spot_price: Annotated[float, typer.Option(min=0, help="Assumed price of a spot machine per hour.")] = 2.66,
    spec: Spec = None,
    steps: Annotated[int, _steps(2)] = 14,
    eval_problems: Annotated[int, _EVALUATION] = 0,
    seed: Annotated[int | None, _seed("problems, base model and drawn machines")] = None,
    gpus: Gpus = "",
    run_dir: RunDir = Path("runs/demo-elastic"),
    cache: Cache = _CACHE,
) -> None:
    """Train on an elastic pool of spot workers and the trainer's own device, then on a fixed pool, and compare both."""
    from ebbtide.demo.elastic.elastic_demo import run
    from ebbtide.demo.elastic.elastic_options import ElasticOptions

    options = ElasticOptions(
        run_dir=run_dir,
        cache=cache,
        gpus=gpus,
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
