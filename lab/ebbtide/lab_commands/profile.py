"""Defines `ebbtide profile`: measures an engine or a trainer here and writes its profile for simulations."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_WORKER_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

Out = Annotated[Path, typer.Option(help="File to write the profile to, *.toml.")]
Minutes = Annotated[float, typer.Option(min=0.1, max=600, help="Maximum minutes to measure, without the start.")]
Device = Annotated[str, typer.Option(help="Name of the device in the profile; the processor's name by default.")]

profile = typer.Typer(help="Measure an engine or a trainer on this machine for simulations.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(profile, name="profile", rich_help_panel="Demos and simulation")


@profile.command(context_settings=dict(_WORKER_OPTIONS))
def engine(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint that the engine boots from.")],
    out: Out,
    minutes: Minutes = 3.0,
    device: Device = "",
) -> None:
    """Measure a vLLM engine, booted as a rollout-worker boots it.

    Further options are those of `ebbtide serve rollout-worker`, such as --slots.
    Run nothing else on its processors and GPUs meanwhile.
    """
    from ebbtide.profiling import profiles

    profiles.profile_engine(model, out, minutes=minutes, device=device, options=context.args)


@profile.command()
def trainer(
    spec: Annotated[Path, typer.Option("--config", help="Spec of the run whose steps are measured, a TOML file.")],
    out: Out,
    model: Annotated[Path | None, typer.Option(help="Checkpoint in place of the spec's model.")] = None,
    minutes: Minutes = 3.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens of each synthetic prompt.")] = 128,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of torch; 0 leaves the choice to torch.")] = 0,
    on: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to train on; auto takes cuda where there is one.")
    ] = ("auto"),
    device: Device = "",
) -> None:
    """Measure one rank of the built-in trainer on synthetic samples. Run nothing else on this machine meanwhile."""
    from ebbtide.profiling import profiles

    profiles.profile_trainer(
        spec, out, model=model, minutes=minutes, prompt_tokens=prompt_tokens, threads=threads, on=on, device=device
    )
