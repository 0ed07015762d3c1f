"""Keys, scripts, packed records and the store's refusals."""

import re
from importlib import resources
from typing import Any

import msgspec
import pytest
import redis.exceptions as redis_errors

from ebbtide.errors import Internal, StoreUnavailable, Unavailable
from ebbtide.rpc.status_table import to_status
from ebbtide.store.connection import StoreRefused, TermSuperseded, fault
from ebbtide.store.records import WritesRefused, body_digest, pack, unpack
from ebbtide.store.scripts import FLEET_KEYS, RUN_KEYS, lua_constants, run_key, script
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling

SCRIPTS = sorted(
    path.name.removesuffix(".lua")
    for path in (resources.files("ebbtide.store") / "lua").iterdir()
    if path.name.endswith(".lua") and path.name != "lib.lua"
)
_LIB = (resources.files("ebbtide.store") / "lua" / "lib.lua").read_text("utf-8")
#: What the library and the constants before it declare.
LIBRARY = {
    name.strip()
    for names in re.findall(r"^local (?:function )?(\w+(?:, \w+)*)", lua_constants() + _LIB, re.MULTILINE)
    for name in names.split(",")
}
#: Read, and write nothing.
UNFENCED = {
    "read_run",
    "read_open",
    "read_tokens",
    "finished_page",
    "events_page",
    "trajectory_page",
    "ended_history",
    "quota_used",
}


def test_all_keys_of_a_run_lie_in_one_slot() -> None:
    keys = {run_key("r.1", name) for name in RUN_KEYS}
    assert len(keys) == len(RUN_KEYS)
    assert {found[1] for key in keys if (found := re.search(r"\{(.*?)\}", key))} == {"r.1"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_names_no_key_but_by_its_constant_and_checks_the_term_before_it_writes(name: Any) -> None:
    constants = set(lua_constants().splitlines())
    body = "\n".join(line for line in script(name).text.decode().splitlines() if line not in constants)
    assert not re.search(r"ebbtide:|KEYS\[", body)
    named = set(re.findall(r"redis\.call\('[A-Z]+', ([A-Z_]+)", body))
    assert named <= RUN_KEYS.keys() | FLEET_KEYS.keys()
    own = body[body.index("\n-- ARGV") if "\n-- ARGV" in body else 0 :]
    writes = re.search(
        r"'(HSET|XADD|APPEND|DEL|HDEL|SADD|ZADD|XDEL|HINCRBY|SET|PEXPIRE)'|emit\(|finish\(|forget\(", own
    )
    check = re.search(r"(barred|deposed)\(ARGV\[1\]|have\[1\] ~= ARGV\[1\]", own)
    if writes and name not in UNFENCED:
        assert check is not None
        assert check.start() < writes.start()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_comes_with_all_parts_of_the_library_that_it_uses(name: Any) -> None:
    declared: set[str] = set()
    for line in script(name).text.decode().splitlines():
        words = set(re.findall(r"\w+", re.sub(r"--.*|'[^']*'|\.\w+|\w+ = \d+(?=[,}])", "", line)))
        found = re.match(r"local (?:function )?([\w, ]+)", line)
        declared |= set(found[1].replace(" ", "").split(",")) if found else set()
        assert not (words & LIBRARY) - declared


def test_a_script_comes_without_what_it_does_not_use() -> None:
    assert "emit" not in script("read_tokens").text.decode()
    assert {one for one in LIBRARY if f"local function {one}(" in script("commit").text.decode()} == {
        "barred",
        "count",
        "refuse",
        "settle",
    }


def request(**more: Any) -> Any:
    fields: dict[str, Any] = {
        "rollout_id": "a",
        "group_id": "g",
        "episode_id": "e",
        "prompt_ids": b"\1\0\0\0",
        "sampling": Sampling(),
    }
    return RolloutRequest(**(fields | more))


def test_records_come_back_as_they_were_and_old_ones_without_new_fields() -> None:
    assert unpack(pack(request(turn=3)), RolloutRequest) == request(turn=3)
    old = msgspec.msgpack.encode(
        {"rollout_id": "a", "group_id": "g", "episode_id": "e", "prompt_ids": b"", "sampling": {}}
    )
    assert unpack(old, RolloutRequest).priority == 0


def test_a_body_is_what_is_asked_for_not_when() -> None:
    assert body_digest(request()) == body_digest(request(min_version=2, max_version=3, priority=1))
    for other in ({"prompt_ids": b"\2\0\0\0"}, {"sampling": Sampling(top_k=3)}, {"turn": 1}, {"group_id": "h"}):
        assert body_digest(request()) != body_digest(request(**other))


@pytest.mark.parametrize(
    ("error", "undone"),
    [
        (redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (redis_errors.ResponseError("Error running script (call to f_1): @user_script:9: -OOM command not"), True),
        (redis_errors.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), True),
        (redis_errors.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis_errors.NoPermissionError("this user has no permissions"), False),  # a script's earlier commands ran
        (redis_errors.ReadOnlyError("You can't write against a read only replica."), False),
        (redis_errors.ConnectionError("Error 111 connecting"), False),
    ],
)
def test_only_refusals_before_a_scripts_first_write_tell_that_nothing_was_done(error: Any, *, undone: bool) -> None:
    assert isinstance(fault(error, where="redis://host:1"), WritesRefused) is undone


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
        (
            redis_errors.ResponseError("Error running script (call to f_1): @user_script:9: -OOM command not allowed"),
            "full",
        ),
        (redis_errors.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), "disk"),
        (redis_errors.ReadOnlyError("You can't write against a read only replica."), "replica"),
        (redis_errors.AuthenticationError("Authentication required."), "password"),
        (redis_errors.NoPermissionError("this user has no permissions"), "allow this user"),
        (redis_errors.BusyLoadingError("Redis is loading the dataset in memory"), "loading"),
        (redis_errors.ConnectionError("Error 111 connecting"), "start it"),
    ],
)
def test_each_refusal_of_the_store_names_the_store_and_the_remedy(error: Any, says: Any) -> None:
    found = fault(error, where="redis://host:1")
    assert isinstance(found, StoreUnavailable)
    assert "redis://host:1" in str(found)
    assert says in str(found)


def test_refusals_of_scripts_are_told_from_those_of_the_store() -> None:
    refused = fault(redis_errors.ResponseError("QUOTA 17"), where="x")
    assert isinstance(refused, StoreRefused)
    assert (refused.code, refused.detail) == ("QUOTA", "17")
    assert isinstance(fault(redis_errors.ResponseError("ERR unknown command"), where="x"), Internal)
    superseded = fault(redis_errors.ResponseError("TERM "), where="x")
    assert isinstance(superseded, TermSuperseded)
    assert isinstance(superseded, Unavailable)
    assert to_status(superseded).code.name == "UNAVAILABLE"
