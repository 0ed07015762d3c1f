"""The page about the command, from its tree of commands and from the programs' settings."""

import inspect
from collections.abc import Iterator
from typing import Any, Final

import typer
from msgspec import Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.__main__ import app
from ebbtide.cli.health import HealthSettings
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.driver.settings import DriverSettings
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.reference.field_tables import cell, type_text
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.runtime import ProcessSettings
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import Setting, described
from ebbtide.trainer.base_model.__main__ import BaseModelSettings
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.weight_relay.export import ExportSettings
from ebbtide.weight_relay.settings import RelaySettings

_HEAD: Final = """# Command line

Every command of `ebbtide`, and every setting of the programs that it starts. Exit status: 0 done, 1 failed, 2
faulty input, 130 interrupted.
"""
_SETTINGS: Final = """## Settings of programs

Each setting is read from the first of these that has it: the flag; the variable, which is `EBBTIDE_`, the
program's name and the flag's name in capitals (`EBBTIDE_ROLLOUT_WORKER_FLUSH_TOKENS`); the TOML file that
`--config` or `EBBTIDE_CONFIG` names, there at the top or in a table of the program's name (`[rollout-worker]`),
with inner tables for names with a dot (`[rollout-worker.vllm]`); the default. Some have a second variable,
which several programs read. Secrets have no flag, since process lists show flags.
"""
_CONNECTIONS: Final = """### Connections

Settings of each connection to a server. A program has them under a prefix for each of its connections, such as
`--client-tls-ca`, and a server under `--server-`. The second variable sets all of them.
"""
_PROGRAMS: Final[dict[str, type[Struct]]] = {
    "coordinator": CoordinatorSettings,
    "rollout-worker": WorkerSettings,
    "weight-relay": RelaySettings,
    "serving-guard": GuardSettings,
    "gateway": GatewaySettings,
    "trainer": TrainerSettings,
    "driver": DriverSettings,
}
#: Programs with settings that run once.
_TOOLS: Final[dict[str, type[Struct]]] = {
    "base-model": BaseModelSettings,
    "health": HealthSettings,
    "weights-export": ExportSettings,
}
#: Defaults that differ from machine to machine.
_OF_THE_MACHINE: Final = {"--mirror-dir": "`/dev/shm/ebbtide-UID`, if there is shared memory"}


def page() -> Iterator[str]:
    """Lines of docs/reference/cli.md."""
    yield from (*_HEAD.splitlines(), "")
    yield from _commands(typer.main.get_command(app), "ebbtide", None)
    yield from (*_SETTINGS.splitlines(), "")
    process, connection = described(ProcessSettings, "program"), described(ClientSecurity, "program")
    yield from ("### Every program", "", *_settings(process))
    yield from (*_CONNECTIONS.splitlines(), "", *_settings(connection))
    for name, kind in (_PROGRAMS | _TOOLS).items():
        yield from (f"### {name}", "")
        settings, prefixes = [], []
        for one in described(kind, name):
            like = next((other for other in connection if _is_like(one, other)), None)
            if like is None and one not in process and one.flag not in {other.flag for other in process}:
                settings.append(one)
            elif like is not None and like.flag == connection[1].flag:
                prefixes.append(f"`{one.flag.removesuffix(like.flag.removeprefix('--'))}...`")
        yield from _settings(settings)
        if prefixes:
            yield from (f"And {' and '.join(prefixes)} ([connections](#connections)).", "")


def _is_like(one: Setting, other: Setting) -> bool:
    """Whether a setting is one of those of every connection, under its program's prefix."""
    return bool(other.variables[1:]) and (one.variables[1:], one.meaning) == (other.variables[1:], other.meaning)


def _commands(command: Any, name: str, context: Any) -> Iterator[str]:
    """`command` and what is below it. Typer brings a click of its own, whose types it does not export."""
    context = command.make_context(name, [], parent=context, resilient_parsing=True)
    inner = command.list_commands(context) if hasattr(command, "commands") else []
    if not inner or (getattr(command, "invoke_without_command", False) and context.parent is not None):
        yield from _command(command, name)
    for one in inner:
        if not command.get_command(context, one).hidden:
            yield from _commands(command.get_command(context, one), f"{name} {one}", context)


def _command(command: Any, name: str) -> Iterator[str]:
    arguments = [
        _value(one) if one.required else f"[{_value(one)}]"
        for one in command.params
        if one.param_type_name == "argument"
    ]
    yield from (f"## `{' '.join([name, *arguments])}`", "")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield from (cell(paragraph), "")
    given = [one for one in command.params if one.help and not one.hidden]
    if given:
        yield from ("| argument or option | default | variable | meaning |", "|---|---|---|---|")
        yield from (_option(one) for one in given)
        yield ""
    if command.context_settings.get("ignore_unknown_options"):
        yield from ("Its flags are [settings](#settings-of-programs).", "")


def _value(parameter: Any) -> str:
    """The placeholder of a value."""
    value = str(parameter.metavar or parameter.name.upper())
    return value[1:-1] if value.startswith("[") else value


def _option(option: Any) -> str:
    names, value, default = _value(option), "", option.default
    if option.param_type_name == "option":
        names, value = "`, `".join([*option.opts, *option.secondary_opts]), "" if option.is_flag else f" {names}"
    if isinstance(option.show_default, str):
        default = option.show_default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = "required" if option.required else f"`{default}`" if default not in (None, "", ()) else "none"
    variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    variable = ", ".join(f"`{one}`" for one in variables)
    return f"| `{names}{value}` | {shown} | {variable} | {cell(option.help)} |"


def _settings(settings: list[Setting]) -> Iterator[str]:
    yield from ("| flag | type | default | second variable | meaning |", "|---|---|---|---|---|")
    for one in settings:
        flag = f"`{one.flag}`" if one.flag else f"no flag: `{one.variables[0]}`"
        second = ", ".join(f"`{name}`" for name in one.variables[1:])
        kind, default = type_text(one.kind).replace('"', ""), one.default
        if one.kind is bool:
            kind, default = f"on, or off by `--no-{one.flag.removeprefix('--')}`", "on" if default == "True" else "off"
        elif default not in ("", "none"):
            default = f"`{default}`"
        default = _OF_THE_MACHINE.get(one.flag, default) or "required"
        yield f"| {flag} | {kind} | {default} | {second} | {cell(one.meaning, sentence=False)} |"
    yield ""
