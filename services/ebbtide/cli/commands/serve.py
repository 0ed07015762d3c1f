"""Defines the commands that hand all their arguments to a program's own main function: services and their tools."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer

from ebbtide.cli.waiting import Waiting

#: Context settings of a command whose program parses the arguments, `--help` included.
ALL_ARGUMENTS: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


class Program(NamedTuple):
    module: str  # of its main function
    help: str


SERVICES: Final = {
    "coordinator": Program("ebbtide.coordinator.__main__", "Assign the rollouts of runs to workers, and store them."),
    "rollout-worker": Program("ebbtide.rollout_worker.__main__", "Generate rollouts with a vLLM engine."),
    "serving-guard": Program(
        "ebbtide.serving_guard.__main__", "Lend a serving engine's idle time, or a trainer's device between its steps."
    ),
    "weight-relay": Program("ebbtide.weight_relay.__main__", "Store policy versions and serve them to workers."),
    "gateway": Program("ebbtide.gateway.__main__", "Serve the policies of runs over HTTP."),
    "trainer": Program("ebbtide.trainer.__main__", "Train runs, one after another."),
    "driver": Program("ebbtide.driver.__main__", "Run the environments of runs."),
}

serve = typer.Typer(help="Run one service of a cluster on this host.", no_args_is_help=True)
weights = typer.Typer(
    help="Export policy versions from a weight-relay. To list versions: ebbtide run weights.", no_args_is_help=True
)


@weights.callback()
def _weights() -> None:
    """Export policy versions from a weight-relay. To list versions: ebbtide run weights."""


def register(app: typer.Typer) -> None:
    for name, program in SERVICES.items():
        serve.command(name, help=program.help, context_settings=ALL_ARGUMENTS)(hand_over(program.module))
    app.add_typer(serve, name="serve", rich_help_panel="Cluster")
    export = hand_over("ebbtide.weight_relay.export", waits_for="the weight-relay")
    text = "Write a policy version into a folder that any web server can serve."
    weights.command("export", help=text, context_settings=ALL_ARGUMENTS)(export)
    app.add_typer(weights, name="weights", rich_help_panel="Operation")
    text = "Check whether a coordinator or weight-relay is serving."
    check = hand_over("ebbtide.cli.health")
    app.command("health", help=text, context_settings=ALL_ARGUMENTS, rich_help_panel="Operation")(check)


def hand_over(module: str, waits_for: str = "") -> Callable[[typer.Context], None]:
    """Returns a command that runs the main function of `module`, which is imported only then.

    With `waits_for`, the program says on stderr that it waits for this; services log what they do instead.
    """

    def command(context: typer.Context) -> None:
        waiting = [partial(Waiting, waits_for)] if waits_for else []
        import_module(module).main(context.args, *waiting)

    return command
