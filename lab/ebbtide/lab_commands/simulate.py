"""Defines `ebbtide simulate`, and `ebbtide run record`, which keeps a run as the work of a simulation."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cluster_connection import Coordinator, Relay, RunId, TokenFile, with_client
from ebbtide.cli.commands.run import run as run_commands

#: Seeds travel as 64 bits with a sign. Those of a scenario's traces have the same bound.
_MOST_SEED = 1 << 62


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Demos and simulation")(simulate)
    run_commands.command()(record)


def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", help="Scenario: a fleet and the runs on it.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="OTHER.toml", help="Another scenario to compare with. Repeatable.")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Recording of `ebbtide run record`; every fleet gets its rollouts."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=_MOST_SEED, help="First seed of everything that is drawn at random.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of seeds; with several, figures have a spread.")
    ] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Maximum concurrent simulations.", show_default="one per core")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write all figures to as JSON.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to draw fleet, machines and steps over time to.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the models, GPUs and example scenarios that are included.")
    ] = False,
) -> None:
    """Simulate runs on a fleet: speed, step times, idle time, regenerated tokens, and cost.

    Decisions are those of a live cluster; engines, links, prices and failures are models.
    """
    if show:
        from ebbtide.cli.views.tables import print_table
        from ebbtide.lab_commands.simulation import example_table, model_table

        print_table(model_table())
        print_table(example_table())
        return
    from ebbtide.lab_commands.simulation import SimulateOptions, run

    options = SimulateOptions(
        scenario=scenario, compare=tuple(compare or ()), recording=recording, seed=seed, seeds=seeds, jobs=jobs,
        json=json, png=png,
    )  # fmt: skip
    raise typer.Exit(run(options))


def record(
    run_id: RunId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write the recording to.")],
    coordinator: Coordinator = None,
    relay: Relay = None,
    token_file: TokenFile = None,
) -> None:
    """Record a run's rollouts, workers and steps in a file for `ebbtide simulate --from`.

    The store keeps the newest attempts of a run only. Record it before its data expires.
    """
    from ebbtide.lab_commands.simulation import fetch_recording, write_recording

    recorded = with_client(lambda client: fetch_recording(client, run_id), coordinator, token_file, relay=relay)
    typer.echo(write_recording(recorded, file))
