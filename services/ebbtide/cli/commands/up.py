"""Defines `ebbtide up`, a cluster on this machine, and `ebbtide base-model`, which makes a small model for it."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.commands.serve import ALL_ARGUMENTS, hand_over

_PANEL = "This machine"
GPUS_HELP = "GPUs to use: how many, or a list of nvidia-smi's numbers or UUIDs (`3,` is GPU 3 alone); all by default."


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=_PANEL)(up)
    base_model = hand_over("ebbtide.trainer.base_model.__main__")
    text = "Train a small base model for a run's environment, and print its path."
    app.command("base-model", help=text, context_settings=ALL_ARGUMENTS, rich_help_panel=_PANEL)(base_model)


def up(
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint of the workers, or a name of the Hub; by default the demo's base model."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of vLLM workers, not counting --generate's. Default: as many as fit on the GPUs that the "
            "trainer leaves; 2 without GPUs.",
            show_default=False,
        ),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option(help="Run one more worker on the trainer's device, which the trainer lends between its steps."),
    ] = False,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum concurrent rollouts of a worker; 256 on GPUs and else 64.", show_default=False
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Number of training processes, each on a GPU of its own if there are GPUs.")
    ] = 1,
    gpus: Annotated[str, typer.Option(help=GPUS_HELP)] = "",
    run_dir: Annotated[Path, typer.Option(help="Folder for logs and data.")] = Path("runs/up"),
    cache: Annotated[Path, typer.Option(help="Folder of base models.")] = Path(".cache/base-models"),
    coordinator: Annotated[
        str, typer.Option(help="Address of the coordinator; port 0 picks a free port.")
    ] = "127.0.0.1:7600",
    standby: Annotated[
        bool, typer.Option(help="Run a second coordinator that takes over if the first is lost.")
    ] = False,
    relay: Annotated[
        str, typer.Option(help="Address of the weight-relay; port 0 picks a free port.")
    ] = "127.0.0.1:7610",
    gateway: Annotated[
        str,
        typer.Option(help="Address of the gateway; port 0 picks a free port, an empty string disables the gateway."),
    ] = "127.0.0.1:7640",
    worker_config: Annotated[
        list[Path] | None,
        typer.Option(
            help="TOML file of worker settings (see `ebbtide serve rollout-worker --help`). Repeatable: workers take "
            "the files in turn."
        ),
    ] = None,
    trainer_config: Annotated[
        Path | None, typer.Option(help="TOML file of trainer settings (see `ebbtide serve trainer --help`).")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="package.module:factory that runs may use as well; its code runs as you. Repeatable."),
    ] = None,
) -> None:
    """Run a cluster on this machine until Ctrl-C. Programs that die are restarted."""
    from ebbtide.cli.up import run
    from ebbtide.local_cluster.local_cluster import ClusterShape

    if workers == 0 and not generate:
        raise typer.BadParameter("nothing would generate: ask for a worker or for --generate", param_hint="--workers")
    if model == Path():  # below it stands for none
        model = Path.cwd()
    shape = ClusterShape(
        model=model or Path(),
        generate=generate,
        slots=slots or 0,
        ranks=ranks,
        coordinator=coordinator,
        standby=f"{coordinator.rpartition(':')[0]}:0" if standby else "",
        relay=relay,
        gateway=gateway,
        worker_configs=tuple(worker_config or ()),
        trainer_config=trainer_config,
        environments=tuple(environment or ()),
    )
    raise typer.Exit(run(shape, run_dir, cache, workers=workers, gpus=gpus))
