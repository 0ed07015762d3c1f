"""Runs the `ebbtide` command. Each command imports what takes time when it runs, so that help is quick."""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Final

import typer
import typer.core

from ebbtide.cli.commands import certs, guard, run, serve, tokens, up, worker
from ebbtide.errors import EbbtideError, InvalidRequest, Unauthenticated

#: In the order in which a user meets them.
_ORDER: Final = (
    *("up", "base-model"),
    *("run", "worker", "serve"),
    *("demo", "simulate", "profile"),
    *("guard", "weights", "health"),
    *("tokens", "certs"),
)


class _Ordered(typer.core.TyperGroup):
    """Lists its commands in their order; without it, all groups would follow all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


app = typer.Typer(
    name="ebbtide",
    cls=_Ordered,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ebbtide {version('ebbtide')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run the rollouts of LLM post-training on preemptible, reserved and borrowed GPUs."""


for _noun in (up, run, worker, serve, guard, tokens, certs):
    _noun.register(app)
for _beside in entry_points(group="ebbtide.commands"):  # demos, simulations, profiles: what is beside the product
    try:
        _beside.load()(app)
    except ImportError as _error:
        print(f"ebbtide: the commands of {_beside.name} are missing: {_error}", file=sys.stderr)  # noqa: T201 - a command


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with status 0 (done), 1 (failed), 2 (faulty input) or 130 (interrupted). Prints each error in a line."""
    try:
        app(args=None if argv is None else list(argv), prog_name="ebbtide")
    except EbbtideError as error:
        print(f"ebbtide: {error}", file=sys.stderr)  # noqa: T201 - this is a command
        sys.exit(2 if isinstance(error, InvalidRequest | Unauthenticated) else 1)


if __name__ == "__main__":
    main()
