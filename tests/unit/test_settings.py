"""Settings: flags over environment over file over defaults; unknown names and bad values are refused by name."""

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from ebbtide import settings
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import InvalidRequest


class Kind(IntEnum):
    RESERVED = 1
    SPOT = 2


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    relay: Annotated[str, Meta(description="address of the relay", extra={"shared": True})]
    server: ServerSettings = ServerSettings.at("127.0.0.1:7600")
    security: ClientSecurity = ClientSecurity()
    flush_tokens: Annotated[int, Meta(ge=1, description="tokens at 100 % of a flush")] = 32
    interval_s: Annotated[float, Meta(gt=0)] = 0.25
    kind: Kind = Kind.RESERVED
    mode: Literal["fast", "slow"] = "fast"
    limit: Annotated[int, Meta(ge=0)] | None = None
    tags: tuple[str, ...] = ()
    engine: dict[str, Any] = {}
    eager: bool = False


def read(*argv: str, env: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    flags = [*argv, *(["--config", str(file)] if file else [])]
    return settings.read(Settings, prog="ebbtide worker", argv=flags, environ={"EBBTIDE_RELAY": "r:1", **(env or {})})


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_defaults_hold_where_nothing_is_said() -> None:
    assert read() == Settings(relay="r:1")


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "flush_tokens = 1\ninterval_s = 1\nmode = 'slow'")
    env = {"EBBTIDE_WORKER_FLUSH_TOKENS": "2", "EBBTIDE_WORKER_INTERVAL_S": "2"}
    made = read("--flush-tokens", "3", env=env, file=file)
    assert (made.flush_tokens, made.interval_s, made.mode, made.kind) == (3, 2.0, "slow", Kind.RESERVED)


def test_every_type_can_be_given_as_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    flags = ["--kind", "spot", "--limit=5", "--tags", "a, b", "--engine", '{"tp": 2}', "--eager", "--server-listen=h:1"]
    names = ("KIND", "LIMIT", "TAGS", "ENGINE", "EAGER", "SERVER_LISTEN")
    values = ("Spot", "5", "a,b", '{"tp": 2}', "true", "h:1")
    env = {f"EBBTIDE_WORKER_{name}": value for name, value in zip(names, values, strict=True)}
    file = toml(
        tmp_path,
        'kind = "spot"\nlimit = 5\ntags = ["a", "b"]\neager = true\nengine = { tp = 2 }\n[server]\nlisten = "h:1"',
    )
    wanted = Settings(
        relay="r:1",
        kind=Kind.SPOT,
        limit=5,
        tags=("a", "b"),
        engine={"tp": 2},
        eager=True,
        server=ServerSettings.at("h:1"),
    )
    assert read(*flags) == read(env=env) == read(file=file) == wanted
    assert read("--no-eager", env=env).eager is False


def test_a_file_may_be_shared_by_programs_each_with_its_table(tmp_path: Path) -> None:
    file = toml(tmp_path, "[worker]\nflush-tokens = 4\n[worker.server]\nlisten = 'h:2'\n[coordinator]\nqueue = 5")
    made = read(file=file)
    assert (made.flush_tokens, made.server.listen) == (4, "h:2")
    assert read(env={"EBBTIDE_CONFIG": str(file)}) == read(env={"EBBTIDE_WORKER_CONFIG": str(file)}) == made
    with pytest.raises(InvalidRequest, match=r"queue: belongs into a table such as \[worker\]"):
        read(file=toml(tmp_path, "queue = 1\n[worker]\nflush_tokens = 4"))


def test_shared_variables_reach_every_field_of_their_name_and_own_ones_beat_them() -> None:
    made = read(env={"EBBTIDE_TOKEN": "all", "EBBTIDE_WORKER_SERVER_TOKEN": "mine"})
    assert (made.server.token, made.security.token) == ("mine", "all")


@pytest.mark.parametrize(
    ("argv", "env", "text", "message"),
    [
        (["--flush-token=3"], {}, "", "--flush-token: unknown flag; did you mean --flush-tokens?"),
        (["--zzz"], {}, "", "--zzz: unknown flag"),
        (["stray"], {}, "", "stray: unknown flag"),
        (["--flush-tokens"], {}, "", "--flush-tokens: expected one argument"),
        (["--flush-tokens=0"], {}, "", "--flush-tokens: expected `int` >= 1"),
        (["--flush-tokens=x"], {}, "", "--flush-tokens: expected `int`, got `str`"),
        (["--interval-s=inf"], {}, "", "--interval-s: must be finite"),
        (["--kind=spots"], {}, "", "--kind: must be one of reserved, spot"),
        (["--mode=medium"], {}, "", "--mode: invalid enum value 'medium'"),
        (["--engine={"], {}, "", "--engine: must be a JSON object"),
        (["--engine=[1]"], {}, "", "--engine: expected `object`, got `array`"),
        (
            [],
            {"EBBTIDE_WORKER_FLUSH": "3"},
            "",
            "_FLUSH: unknown variable; did you mean EBBTIDE_WORKER_",
        ),
        ([], {"EBBTIDE_WORKER_FLUSH_TOKENS": "0"}, "", "EBBTIDE_WORKER_FLUSH_TOKENS: expected `int` >= 1"),
        ([], {}, "flush_token = 3", "settings.toml: flush_token: unknown key; did you mean flush_tokens?"),
        ([], {}, "[wroker]\nflush_tokens = 3", "settings.toml: wroker: unknown key; did you mean worker?"),
        ([], {}, "[server]\nlissten = 3", "settings.toml: server.lissten: unknown key; did you mean server.listen?"),
        ([], {}, "flush_tokens = '3'", "settings.toml: flush_tokens: expected `int`, got `str`"),
        ([], {}, "server = 3", "settings.toml: server: unknown key"),
        ([], {}, "kind = 2", "settings.toml: kind: must be one of reserved, spot"),
        ([], {}, "flush_tokens = ", "settings.toml: Invalid value"),
    ],
)
def test_what_is_unknown_or_bad_is_refused_by_the_name_it_was_given_under(
    tmp_path: Path, argv: list[str], env: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(*argv, env=env, file=toml(tmp_path, text) if text else None)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.toml: .*No such file"):
        read("--config", "nowhere.toml")


def test_a_field_without_default_is_asked_for_in_all_its_ways() -> None:
    asked = "relay: is required: set --relay or EBBTIDE_WORKER_RELAY or EBBTIDE_RELAY"
    with pytest.raises(InvalidRequest, match=asked):
        settings.read(Settings, prog="ebbtide worker", argv=[], environ={})


def test_a_secret_takes_no_flag_and_is_not_repeated() -> None:
    with pytest.raises(InvalidRequest, match="set EBBTIDE_WORKER_SERVER_TOKEN or EBBTIDE_TOKEN") as refused:
        read("--server-token=hunter2")
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(read(env={"EBBTIDE_TOKEN": "hunter2"}))


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    assert read(env={"EBBTIDE_COORDINATOR_QUEUE": "3", "EBBTIDE_WORKER_FLUSH_TOKENS": "", "HOME": "/"}) == read()


def test_variables_are_named_after_the_program_where_the_command_has_another_name() -> None:
    environ = {"EBBTIDE_RELAY": "r:1", "EBBTIDE_WORKER_FLUSH_TOKENS": "7"}
    found = settings.read(Settings, prog="ebbtide worker run", program="worker", argv=[], environ=environ)
    assert found.flush_tokens == 7


def test_help_tells_description_default_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.load(Settings, prog="ebbtide worker", argv=["--help"], description="Generates.")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Generates." in text
    assert "Tokens at 100 % of a flush. [env var: EBBTIDE_WORKER_FLUSH_TOKENS] [default: 32]" in text
    assert "--relay <str> Address of the relay. [env var: EBBTIDE_WORKER_RELAY, EBBTIDE_RELAY] [required]" in text
    assert "--kind {reserved,spot}" in text
    assert "[default: reserved]" in text
    assert "[default: 127.0.0.1:7600]" in text
    assert "--server-token " not in text


def test_bad_settings_end_the_program_with_status_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.load(Settings, prog="ebbtide worker", argv=["--flush-tokens", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("ebbtide worker: --flush-tokens: expected `int` >= 1\n")
