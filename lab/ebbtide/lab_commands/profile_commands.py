"""Defines the commands that measure an engine or a trainer here and write its profile for the simulator."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_WORKER_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

Out = Annotated[Path, typer.Option(help="File to write, *.toml.")]
Minutes = Annotated[float, typer.Option(min=0.1, max=600, help="Longest time to measure, the start not counted.")]
Device = Annotated[str, typer.Option(help="What to call the device in the profile. Default: the processor's name.")]

profile = typer.Typer(help="Measure an engine or a trainer on this machine, for simulations.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(profile, name="profile", rich_help_panel="This machine")


@profile.command(context_settings=dict(_WORKER_OPTIONS))
def engine(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint directory that the engine boots from.")],
    out: Out,
    minutes: Minutes = 3.0,
    device: Device = "",
) -> None:
    """Measure a vLLM engine, booted as a rollout-worker boots it. Further options are those of that program, such as
    --slots and --vllm-threads. Nothing else should run on its processors or GPUs meanwhile."""
    from ebbtide.profiling import profiles

    profiles.profile_engine(model, out, minutes=minutes, device=device, options=context.args)


@profile.command()
def trainer(
    spec: Annotated[Path, typer.Option("--config", help="Spec of the run (TOML) whose steps are measured.")],
    out: Out,
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory, instead of the spec's model.")] = None,
    minutes: Minutes = 3.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each made-up prompt.")] = 128,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of torch. 0: torch's choice.")] = 0,
    on: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train. auto: cuda if there is one.")] = (
        "auto"
    ),
    device: Device = "",
) -> None:
    """Measure one rank of the built-in trainer on made-up samples. Nothing else should run beside it."""
    from ebbtide.profiling import profiles

    profiles.profile_trainer(
        spec, out, model=model, minutes=minutes, prompt_tokens=prompt_tokens, threads=threads, on=on, device=device
    )
