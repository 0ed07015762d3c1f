"""Reads a program's settings into a msgspec struct, from flags, environment, TOML file and defaults, in this order.

A field `flush_tokens` of the program `worker` is the flag `--flush-tokens`, the variable `EBBTIDE_WORKER_FLUSH_TOKENS`
and the key `flush_tokens`, at the file's top or in its table `[worker]`. A nested struct's name comes first
(`--server-listen`, `[worker.server]`). Fields marked as shared are read from `EBBTIDE_<FIELD>`, too, or from
`EBBTIDE_<NAME>` if the mark is a name. Fields marked as secret have no flag, because process lists show flags. Unknown
names are refused; empty variables are ignored.
"""

import argparse
import difflib
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from ebbtide.errors import InvalidRequest

S = TypeVar("S", bound=Struct)
_CONFIG = "config"


def load(kind: type[S], *, prog: str, program: str = "", argv: Sequence[str] | None = None, description: str = "") -> S:
    """The settings of `program`, in variables and files by its name, which is by default the last word of `prog`: the
    command that runs it. Bad settings exit with status 2 and one line."""
    try:
        return read(kind, prog=prog, program=program, argv=argv, description=description)
    except InvalidRequest as error:
        print(f"{prog}: {error}\n(see {prog} --help)", file=sys.stderr)  # noqa: T201 - before there are logs
        raise SystemExit(2) from None


def read(
    kind: type[S],
    *,
    prog: str,
    program: str = "",
    argv: Sequence[str] | None = None,
    description: str = "",
    environ: Mapping[str, str] | None = None,
) -> S:
    """Like `load`, but raises `InvalidRequest` whose field is the bad flag, variable or key."""
    environ = os.environ if environ is None else environ
    source = _Source(program or prog.rsplit(maxsplit=1)[-1], list(_fields(kind)))
    flags = source.flags(prog, description, sys.argv[1:] if argv is None else argv)
    values = source.environment(environ)
    path = flags.pop((_CONFIG,), None) or environ.get(f"{source.prefix}CONFIG") or environ.get("EBBTIDE_CONFIG")
    return _build(kind, {**(source.file(Path(path)) if path else {}), **values, **flags}, source.prefix)


class Setting(NamedTuple):
    """A setting as its users see it. `flag` is empty for a secret, `default` for a setting that is required."""

    flag: str
    variables: tuple[str, ...]
    kind: Any  # its type, with bounds
    default: str
    meaning: str


def described(kind: type[Struct], service: str) -> list[Setting]:
    """The settings of a program, in their order."""
    prefix = _Source(service, []).prefix
    return [
        Setting(
            flag="" if field.mark("secret") else field.flag,
            variables=tuple(field.variables(prefix)),
            kind=field.hint,
            default="" if field.default is NODEFAULT else _shown(field.default),
            meaning=field.meta.description or "",
        )
        for field in _fields(kind)
    ]


class _Field(NamedTuple):
    path: tuple[str, ...]
    hint: Any
    default: Any
    meta: Meta

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def variables(self, prefix: str) -> list[str]:
        own, shared = prefix + "_".join(self.path).upper(), self.mark("shared")
        name = shared if isinstance(shared, str) else self.path[-1]
        return [own, f"EBBTIDE_{name.upper()}"] if shared else [own]

    def mark(self, what: str) -> Any:
        return (self.meta.extra or {}).get(what)


Values = dict[tuple[str, ...], Any]


class _Source:
    """Reads one program's values from each source, converted to their fields' types."""

    def __init__(self, service: str, fields: list[_Field]) -> None:
        self.service, self.fields = service, fields
        self.prefix = f"EBBTIDE_{service.upper().replace('-', '_')}_"

    def flags(self, prog: str, description: str, argv: Sequence[str]) -> Values:
        parser = _Parser(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            exit_on_error=False,
        )
        parser.add_argument("-h", "--help", action="help", help="Show this message and exit.")
        own = f"{self.prefix}CONFIG"
        parser.add_argument(
            "--config", metavar="<path>", help=f"TOML file of settings. [env var: {own}, EBBTIDE_CONFIG]"
        )
        for field in self.fields:
            if not field.mark("secret"):
                _add_flag(parser, field, self.prefix)
        try:
            given, unknown = parser.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise InvalidRequest(error.message, field=error.argument_name or "") from None
        known = {field.flag: field for field in self.fields}
        for name in (text.partition("=")[0] for text in unknown):
            if name in known:
                variables = " or ".join(known[name].variables(self.prefix))
                raise InvalidRequest(f"a secret has no flag (process lists show flags); set {variables}", field=name)
            raise _unknown(name, [*known, "--config"], "flag")
        found: Values = {(_CONFIG,): given.config} if hasattr(given, _CONFIG) else {}
        for field in self.fields:
            if hasattr(given, field.key):
                found[field.path] = _from_text(getattr(given, field.key), field, field.flag)
        return found

    def environment(self, environ: Mapping[str, str]) -> Values:
        known = {name: field for field in self.fields for name in reversed(field.variables(self.prefix))}
        own = [name for name in known if name.startswith(self.prefix)] + [f"{self.prefix}CONFIG"]
        for name in environ:
            if name.startswith(self.prefix) and name not in own:
                raise _unknown(name, own, "variable")
        found: Values = {}
        for field in self.fields:
            for name in field.variables(self.prefix):
                if environ.get(name):
                    found[field.path] = _from_text(environ[name], field, name)
                    break
        return found

    def file(self, path: Path) -> Values:
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidRequest(str(error), field=str(path)) from None
        own = table.get(self.service, table.get(self.service.replace("-", "_")))
        if isinstance(own, dict):
            # Other tables belong to other programs that share the file.
            if loose := [name for name, value in table.items() if not isinstance(value, dict)]:
                raise InvalidRequest(f"belongs into a table such as [{self.service}]", field=f"{path}: {loose[0]}")
            table = own
        known = {field.path: field for field in self.fields}
        found: Values = {}
        for key, value in _leaves(table, (), known):
            if key not in known:
                raise _unknown(".".join(key), [*(field.key for field in self.fields), self.service], "key", path)
            found[key] = _checked(value, known[key], f"{path}: {'.'.join(key)}", strict=True)
        return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(message)


def _add_flag(parser: argparse.ArgumentParser, field: _Field, prefix: str) -> None:
    default = "required" if field.default is NODEFAULT else f"default: {_shown(field.default)}"
    text = f"{_sentence(field.meta.description or '')} [env var: {', '.join(field.variables(prefix))}] [{default}]"
    if field.hint is bool:
        parser.add_argument(
            field.flag, dest=field.key, action=argparse.BooleanOptionalAction, help=text.replace("%", "%%")
        )
        return
    names = _names(field.hint)
    metavar = "{" + ",".join(names) + "}" if names else f"<{_kind(_bare(field.hint))}>"
    parser.add_argument(field.flag, dest=field.key, metavar=metavar, help=text.replace("%", "%%"))


def _sentence(description: str) -> str:
    """With a full stop, and a capital letter unless it begins with a name such as vLLM or with a form such as A=B."""
    begins_with_a_word = re.match(r"[a-z]+[ ,;-]", description)
    return f"{description[0].upper() if begins_with_a_word else description[:1]}{description[1:]}."


def _kind(hint: Any) -> str:
    origin = get_origin(hint) or hint
    return {tuple: "list", dict: "json"}.get(origin, getattr(origin, "__name__", "value"))


def _fields(kind: type[Struct], defaults: Struct | None = None, prefix: tuple[str, ...] = ()) -> Iterator[_Field]:
    hints = get_type_hints(kind, include_extras=True)
    for info in msgspec.structs.fields(kind):
        hint, path = hints[info.name], (*prefix, info.name)
        default = getattr(defaults, info.name) if defaults is not None else _default(info)
        metas = [meta for meta in get_args(hint)[1:] if isinstance(meta, Meta)] if get_origin(hint) is Annotated else []
        bare = get_args(hint)[0] if metas else hint
        if isinstance(bare, type) and issubclass(bare, Struct):
            yield from _fields(bare, None if default is NODEFAULT else default, path)
        else:
            yield _Field(path, bare if bare is bool else hint, default, metas[0] if metas else Meta())


def _default(info: msgspec.structs.FieldInfo) -> Any:
    return info.default_factory() if info.default_factory is not NODEFAULT else info.default


def _build(kind: type[S], values: Values, prefix: str) -> S:
    missing = [f for f in _fields(kind) if f.default is NODEFAULT and f.path not in values]
    if missing:
        first = missing[0]
        ways = [*([] if first.mark("secret") else [first.flag]), *first.variables(prefix)]
        raise InvalidRequest(f"is required: set {' or '.join(ways)}", field=first.key)
    tree: dict[str, Any] = {}
    for field in _fields(kind):
        node = tree
        for name in field.path[:-1]:
            node = node.setdefault(name, {})
        node[field.path[-1]] = values.get(field.path, field.default)
    return _assemble(kind, tree)


def _assemble(kind: type[S], tree: dict[str, Any]) -> S:
    hints = get_type_hints(kind)
    nested = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Struct)}
    return kind(**{name: _assemble(nested[name], value) if name in nested else value for name, value in tree.items()})


def _leaves(
    table: Mapping[str, Any], path: tuple[str, ...], known: Iterable[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = {key[: i + 1] for key in known for i in range(len(key) - 1)}
    for name, value in table.items():
        below = (*path, name.replace("-", "_"))
        if below in inner and isinstance(value, dict):
            yield from _leaves(value, below, known)
        else:
            yield below, value


def _from_text(value: Any, field: _Field, source: str) -> Any:
    if not isinstance(value, str):
        return value
    bare = _bare(field.hint)
    parsed: Any = value
    if get_origin(bare) is tuple:
        parsed = [part.strip() for part in value.split(",") if part.strip()]
    elif get_origin(bare) is dict or bare is dict:
        try:
            parsed = msgspec.json.decode(value)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"must be a JSON object ({error})", field=source) from None
    return _checked(parsed, field, source, strict=False)


def _checked(value: Any, field: _Field, source: str, *, strict: bool) -> Any:
    bare = _bare(field.hint)
    if isinstance(bare, type) and issubclass(bare, Enum):
        members = {member.name.lower(): member for member in bare}
        if not isinstance(value, str) or value.lower() not in members:
            raise InvalidRequest(f"must be one of {', '.join(members)}", field=source)
        return members[value.lower()]
    try:
        made = msgspec.convert(value, field.hint, strict=strict)
    except msgspec.ValidationError as error:
        text = str(error)
        raise InvalidRequest(text[0].lower() + text[1:], field=source) from None
    if isinstance(made, float) and not math.isfinite(made):
        raise InvalidRequest("must be finite", field=source)
    return made


def _bare(hint: Any) -> Any:
    """The type inside `Annotated` and `| None`."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    rest = [arg for arg in get_args(hint) if arg is not type(None)]
    return _bare(rest[0]) if len(rest) == 1 and type(None) in get_args(hint) else hint


def _names(hint: Any) -> list[str]:
    bare = _bare(hint)
    if isinstance(bare, type) and issubclass(bare, Enum):
        return [member.name.lower() for member in bare]
    return [str(arg) for arg in get_args(bare)] if "Literal" in str(get_origin(bare)) else []


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None or value in ("", {}) else str(value)


def _unknown(name: str, known: Iterable[str], what: str, path: Path | None = None) -> InvalidRequest:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"unknown {what}{hint}", field=f"{path}: {name}" if path else name)
