"""The contract goes on serving peers of the last release: each kind of break is found, and nothing else."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos.breaking import PROTOS, breaks, compiled, main, newest_release

BEFORE: Final = """
syntax = "proto3";
package p;

service Keeper {
  rpc Get(Asked) returns (Answer);
  rpc Watch(Asked) returns (stream Answer);
}

message Asked {
  reserved 4, 6 to 8;
  reserved "former";
  string name = 1;
  uint32 count = 2;
  repeated bytes parts = 3;
  oneof kind {
    string text = 9;
    Inner inner = 10;
  }
  optional double after_s = 11;
  message Inner { uint32 depth = 1; }
}

message Answer { Status status = 1; }

enum Status {
  STATUS_UNSPECIFIED = 0;
  STATUS_GOOD = 1;
  STATUS_BAD = 2;
}
"""


class Change(NamedTuple):
    what: str
    line: str
    by: str
    found: str = ""  # in the complaint; empty: it is no break


BROKEN: Final = [
    Change("a field is removed", "  uint32 count = 2;\n", "", "p.Asked.count = 2: the field is gone"),
    Change(
        "a removed field reserves its number alone",
        "uint32 count = 2;",
        "reserved 2;",
        "reserve its number and its name",
    ),
    Change(
        "a field has another number", "uint32 count = 2;", "uint32 count = 5;", "p.Asked.count = 2: the field is gone"
    ),
    Change("a field has another type", "uint32 count = 2;", "uint64 count = 2;", "was uint32, is uint64"),
    Change(
        "a field has another message's type",
        "Inner inner = 10;",
        "Answer inner = 10;",
        "was p.Asked.Inner, is p.Answer",
    ),
    Change(
        "a field has another name", "string name = 1;", "string title = 1;", "p.Asked.name = 1: is called title now"
    ),
    Change("a field has another name in JSON", "string name = 1;", 'string name = 1 [json_name = "n"];', "(n in JSON)"),
    Change("a field becomes a list", "string name = 1;", "repeated string name = 1;", "was optional, is repeated"),
    Change("a list becomes a field", "repeated bytes parts = 3;", "bytes parts = 3;", "was repeated, is optional"),
    Change(
        "presence is no longer told",
        "optional double after_s",
        "double after_s",
        "whether it was set is no longer told",
    ),
    Change(
        "a field moves out of its oneof",
        "  oneof kind {\n    string text = 9;",
        "string text = 9;\n  oneof kind {",
        "was in oneof kind, is in no oneof",
    ),
    Change(
        "a field moves into a oneof",
        "  uint32 count = 2;\n",
        "  oneof other { uint32 count = 2; }\n",
        "was in no oneof, is in oneof other",
    ),
    Change("a nested field is removed", "uint32 depth = 1;", "", "p.Asked.Inner.depth = 1: the field is gone"),
    Change(
        "a reserved number is free again", "reserved 4, 6 to 8;", "reserved 4, 6 to 7;", "number 8 is reserved no more"
    ),
    Change(
        "a reserved number is used",
        "reserved 4, 6 to 8;",
        "reserved 6 to 8; string again = 4;",
        "number 4 is reserved no more",
    ),
    Change("a reserved name is free again", '  reserved "former";\n', "", "the name former is reserved no more"),
    Change("an enum's value is removed", "  STATUS_BAD = 2;\n", "", "p.Status.STATUS_BAD = 2: the value is gone"),
    Change("an enum's value has another name", "STATUS_BAD = 2;", "STATUS_POOR = 2;", "is called STATUS_POOR now"),
    Change("a call is removed", "  rpc Get(Asked) returns (Answer);\n", "", "p.Keeper/Get: the call is gone"),
    Change("a call takes something else", "rpc Get(Asked)", "rpc Get(Answer)", "p.Keeper/Get: input_type was .p.Asked"),
    Change(
        "a call answers something else",
        "rpc Get(Asked) returns (Answer)",
        "rpc Get(Asked) returns (Asked)",
        "output_type",
    ),
    Change("a call takes a stream", "rpc Get(Asked)", "rpc Get(stream Asked)", "client_streaming was False, is True"),
    Change("a stream becomes one answer", "returns (stream Answer)", "returns (Answer)", "server_streaming was True"),
    Change("a service is removed", "service Keeper", "service Warden", "p.Keeper/Get: the call is gone"),
]
SOUND: Final = [
    Change("a field is added", "uint32 count = 2;", "uint32 count = 2; uint32 more = 12;"),
    Change("a oneof gets a member", "string text = 9;", "string text = 9; bytes raw = 12;"),
    Change("a value is added", "STATUS_BAD = 2;", "STATUS_BAD = 2; STATUS_UGLY = 3;"),
    Change("a call is added", "rpc Get(", "rpc Put(Asked) returns (Answer);\n  rpc Get("),
    Change("a message is added", "message Answer", "message More { string text = 1; }\nmessage Answer"),
    Change("a removed field reserves number and name", "uint32 count = 2;", 'reserved 2; reserved "count";'),
    Change("a removed value reserves number and name", "STATUS_BAD = 2;", 'reserved 2; reserved "STATUS_BAD";'),
    Change("more is reserved", "reserved 4,", "reserved 4, 5,"),
    Change(
        "fields stand in another order",
        "  string name = 1;\n  uint32 count = 2;\n",
        "  uint32 count = 2;\n  string name = 1;\n",
    ),
]


def folder(parent: Path, text: str) -> Path:
    parent.mkdir()
    (parent / "p.proto").write_text(text)
    return parent


def changed(change: Change) -> str:
    assert BEFORE.count(change.line) == 1, change.line
    return BEFORE.replace(change.line, change.by)


def buf() -> str:
    """buf's binary: on the PATH, or where `EBBTIDE_BUF` says."""
    if found := os.environ.get("EBBTIDE_BUF") or shutil.which("buf"):
        return found
    return pytest.skip("buf is not installed (npm install @bufbuild/buf, and EBBTIDE_BUF=.../bin/buf)")


@pytest.mark.parametrize("change", [*BROKEN, *SOUND], ids=lambda change: change.what)
def test_each_kind_of_break_is_found_and_an_addition_is_none(change: Change, tmp_path: Path) -> None:
    before = compiled(folder(tmp_path / "before", BEFORE))
    found = breaks(before, compiled(folder(tmp_path / "now", changed(change))))
    assert bool(found) is bool(change.found), found
    assert change.found in "\n".join(found)


def test_the_present_contract_serves_peers_of_the_last_release() -> None:
    last = newest_release()
    found = breaks(FileDescriptorSet.FromString(last.read_bytes()), compiled())
    assert not found, f"peers of {last.stem} would not understand; add fields instead of changing them:\n" + "\n".join(
        found
    )


def test_the_newest_release_is_the_highest_version_not_the_last_by_name(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.2.1"):
        (tmp_path / f"{version}.binpb").write_bytes(b"")
    assert newest_release(tmp_path).stem == "0.10.0"
    with pytest.raises(FileNotFoundError, match="--release"):
        newest_release(tmp_path / "none")


def test_a_release_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (PROTOS / "released").iterdir()}
    version = newest_release().stem
    assert main([]) == 0
    assert capsys.readouterr().out == f"compatible with {version}\n"
    if f'\nversion = "{version}"\n' in (PROTOS.parent / "pyproject.toml").read_text():
        assert main(["--release"]) == 1
        assert "was released already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (PROTOS / "released").iterdir()} == before


@pytest.mark.parametrize("change", [*BROKEN, *SOUND], ids=lambda change: change.what)
def test_buf_comes_to_the_same_verdict(change: Change, tmp_path: Path) -> None:
    command = buf()
    (tmp_path / "before.binpb").write_bytes(compiled(folder(tmp_path / "before", BEFORE)).SerializeToString())
    now = folder(tmp_path / "now", changed(change))
    shutil.copy(PROTOS / "buf.yaml", now)
    arguments = [command, "breaking", str(now), "--against", str(tmp_path / "before.binpb")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is bool(change.found), done.stdout + done.stderr


def test_buf_finds_the_present_contract_compatible() -> None:
    done = subprocess.run(
        [buf(), "breaking", str(PROTOS), "--against", str(newest_release())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
