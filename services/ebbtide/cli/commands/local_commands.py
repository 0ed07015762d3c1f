"""Defines the commands that run a cluster on this machine, and the one that makes a base model."""

from pathlib import Path
from typing import Annotated

import typer

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="This machine")(up)
    app.command("base-model", context_settings=dict(_PASS_ON), rich_help_panel="This machine")(base_model)


def up(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint that the workers boot from. None: the demo's base model.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="vLLM workers beside the trainer's own.")] = 2,
    generate: Annotated[
        bool, typer.Option(help="Run one more worker on the trainer's device, which lends it between its steps.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, help="Most rollouts that a worker holds.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together, each on a GPU if any.")] = 1,
    run_dir: Annotated[Path, typer.Option(help="Folder for logs and data.")] = Path("runs/up"),
    cache: Annotated[Path, typer.Option(help="Folder of base models.")] = Path(".cache/base-models"),
    coordinator: Annotated[str, typer.Option(help="Address of the coordinator. Port 0: any.")] = "127.0.0.1:7600",
    standby: Annotated[bool, typer.Option(help="Run a second coordinator that takes over from a lost one.")] = False,
    relay: Annotated[str, typer.Option(help="Address of the weight-relay. Port 0: any.")] = "127.0.0.1:7610",
    gateway: Annotated[str, typer.Option(help="Address of the gateway. Port 0: any. Empty: none.")] = "127.0.0.1:7640",
    worker_config: Annotated[
        Path | None, typer.Option(help="TOML file of settings for the workers (see ebbtide rollout-worker --help).")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="package.module:factory that runs may name too; its code runs as you. May be repeated."),
    ] = None,
) -> None:
    """Run a cluster on this machine until Ctrl-C. Programs that die are started again."""
    from ebbtide.cli.commands.up_command import run
    from ebbtide.local_cluster.local_cluster import ClusterShape

    if not workers and not generate:
        raise typer.BadParameter("nobody would generate: ask for a worker, or for --generate", param_hint="--workers")
    if model == Path():  # below it stands for none
        model = Path.cwd()
    shape = ClusterShape(
        model=model or Path(),
        workers=workers,
        generate=generate,
        slots=slots,
        ranks=ranks,
        coordinator=coordinator,
        standby=f"{coordinator.rpartition(':')[0]}:0" if standby else "",
        relay=relay,
        gateway=gateway,
        worker_config=worker_config,
        environments=tuple(environment or ()),
    )
    raise typer.Exit(run(shape, run_dir, cache))


def base_model(context: typer.Context) -> None:
    """Make a small model that half masters a run's environment, and print its path."""
    from importlib import import_module

    import_module("ebbtide.trainer.base_model.__main__").main(context.args)
