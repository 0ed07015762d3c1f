"""Defines the commands that start programs; all arguments go to the program's own main function."""

from functools import partial
from importlib import import_module
from typing import Final

import typer

from ebbtide.cli.waiting import Waiting

#: command -> module of its main function, help.
SERVICES: Final = {
    "coordinator": (
        "ebbtide.coordinator.__main__",
        "Run a coordinator. It assigns the rollouts of runs to workers.",
    ),
    "rollout-worker": ("ebbtide.rollout_worker.__main__", "Run a rollout-worker. Its vLLM engine generates rollouts."),
    "serving-guard": (
        "ebbtide.serving_guard.__main__",
        "Run a serving-guard. It lends a serving engine's idle time, or a trainer's device between steps.",
    ),
    "weight-relay": ("ebbtide.weight_relay.__main__", "Run a weight-relay. It stores and serves policy versions."),
    "gateway": ("ebbtide.gateway.__main__", "Run a gateway. It serves runs' policies over HTTP."),
    "trainer": ("ebbtide.trainer.__main__", "Run a trainer. It trains runs, one after another."),
    "driver": ("ebbtide.driver.__main__", "Run an episode driver. It runs the environments of runs."),
}
#: Further programs of services.
BESIDE: Final = {
    "weights-export": ("ebbtide.weight_relay.export", "Write a version into a folder that any web server can serve."),
}
_HEALTH: Final = "Check whether a coordinator or weight-relay serves."
_PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    for name, (module, text) in (SERVICES | BESIDE).items():
        waits_for = "" if name in SERVICES else "the weight-relay"  # services log what they do
        command = _command(module, waits_for)
        app.command(name, help=text, context_settings=dict(_PASS_ON), rich_help_panel="Services")(command)
    app.command(help=_HEALTH, context_settings=dict(_PASS_ON), rich_help_panel="Services")(health)


def health(context: typer.Context) -> None:
    import_module("ebbtide.cli.commands.health_command").main(context.args)


def _command(module: str, waits_for: str):  # type: ignore[no-untyped-def]
    def command(context: typer.Context) -> None:
        waiting = [partial(Waiting, waits_for)] if waits_for else []
        import_module(module).main(context.args, *waiting)

    return command
