"""Commands that are programs of their own: all that follows the name goes to the program's own main function."""

from importlib import import_module
from typing import Final

import typer

#: command -> module of its main function, and what it is.
SERVICES: Final = {
    "coordinator": ("ebbtide.coordinator", "Run a coordinator: runs, rollouts and who generates what."),
    "rollout-worker": ("ebbtide.rollout_worker", "Run a rollout-worker: one vLLM engine that generates."),
    "serving-guard": (
        "ebbtide.serving_guard",
        "Run a serving-guard: it lends a serving engine's idle time to a worker.",
    ),
    "weight-relay": ("ebbtide.weight_relay", "Run a weight-relay: it serves policy versions."),
    "trainer": ("ebbtide.trainer", "Run a trainer: it trains runs, one after another."),
    "driver": ("ebbtide.driver", "Run an episode driver: it runs the environments of runs."),
}
#: What else comes with a service.
BESIDE: Final = {
    "weights-export": ("ebbtide.weight_relay.export", "Write a version into a folder for any web server to serve."),
}
_HEALTH: Final = "Ask a coordinator or weight-relay whether it serves, for health checks."
_PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    for name, (module, text) in (SERVICES | BESIDE).items():
        app.command(name, help=text, context_settings=dict(_PASS_ON), rich_help_panel="Services")(_command(module))
    app.command(help=_HEALTH, context_settings=dict(_PASS_ON), rich_help_panel="Services")(health)


def health(context: typer.Context) -> None:
    import_module("ebbtide.cli.commands.health_command").main(context.args)


def _command(module: str):  # type: ignore[no-untyped-def]
    def command(context: typer.Context) -> None:
        import_module(f"{module}.__main__").main(context.args)

    return command
