"""Whether the contract of `protos/` still serves those who speak the last released one.

`python -m protos.breaking` compares what protoc makes of the protos with the newest `released/VERSION.binpb`, a
FileDescriptorSet. `--release` writes the one of pyproject.toml's version, once. What counts as a break is what an older
peer would misread, miss or fail at, on the wire or in JSON; `buf.yaml` says the same to `buf breaking`, as rules of its
own. Adding is never one: fields, values, messages, calls; nor is a removed field whose number and name are reserved.
"""

import argparse
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
)

PROTOS: Final = Path(__file__).parent
RELEASED: Final = PROTOS / "released"


def compiled(protos: Path = PROTOS) -> FileDescriptorSet:
    """What protoc makes of all `.proto` below the folder. Raises `ValueError` if they do not compile."""
    from grpc_tools import protoc

    sources = sorted(str(path) for path in protos.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "set"
        well_known = Path(protoc.__file__).parent / "_proto"
        if protoc.main(["protoc", f"-I{protos}", f"-I{well_known}", f"--descriptor_set_out={out}", *sources]):
            raise ValueError(f"the protos in {protos} do not compile")
        return FileDescriptorSet.FromString(out.read_bytes())


def newest_release(folder: Path = RELEASED) -> Path:
    """Raises `FileNotFoundError` if nothing was released."""
    found = sorted(folder.glob("*.binpb"), key=lambda path: [int(part) for part in path.stem.split(".")])
    if not found:
        raise FileNotFoundError(f"no release in {folder}: write one with `python -m protos.breaking --release`")
    return found[-1]


def breaks(before: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """What of `before` is broken in `now`, a line each; empty if nothing is."""
    return [*_messages(before, now), *_enums(before, now), *_services(before, now)]


# -- messages --------------------------------------------------------------------------------------------------------


def _messages(before: FileDescriptorSet, now: FileDescriptorSet) -> Iterator[str]:
    present = dict(_all_messages(now))
    for name, old in _all_messages(before):
        if (new := present.get(name)) is None:
            yield f"{name}: the message is gone"
            continue
        fields = {field.number: field for field in new.field}
        for field in old.field:
            if field.number in fields:
                yield from _field(name, old, field, new, fields[field.number])
            else:
                yield from _removed(f"{name}.{field.name}", "field", field.number, field.name, _reserved(new), new)
        for number in sorted(_numbers(_reserved(old)) - _numbers(_reserved(new))):
            yield f"{name}: number {number} is reserved no more"
        for gone in sorted(set(old.reserved_name) - set(new.reserved_name)):
            yield f"{name}: the name {gone} is reserved no more"


def _field(
    message: str, old_message: DescriptorProto, old: FieldDescriptorProto, new_message: DescriptorProto,
    new: FieldDescriptorProto,
) -> Iterator[str]:  # fmt: skip
    where = f"{message}.{old.name} = {old.number}"
    if new.name != old.name or new.json_name != old.json_name:
        yield f"{where}: is called {new.name} now ({new.json_name} in JSON)"
    if (new.type, new.type_name) != (old.type, old.type_name):
        yield f"{where}: was {_type(old)}, is {_type(new)}"
    if new.label != old.label:
        yield f"{where}: was {_label(old)}, is {_label(new)}"
    if new.proto3_optional != old.proto3_optional:
        yield f"{where}: whether it was set is {'' if new.proto3_optional else 'no longer '}told"
    if _oneof(new_message, new) != _oneof(old_message, old):
        yield f"{where}: was in {_oneof(old_message, old)}, is in {_oneof(new_message, new)}"


def _removed(
    where: str, what: str, number: int, name: str, reserved: Iterable[range], new: DescriptorProto | EnumDescriptorProto
) -> Iterator[str]:
    if number not in _numbers(reserved) or name not in new.reserved_name:
        yield f"{where} = {number}: the {what} is gone; bring it back, or reserve its number and its name"


def _type(field: FieldDescriptorProto) -> str:
    return field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _label(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """The oneof that the field is in by its source; an `optional` one is in a synthetic one."""
    if field.proto3_optional or not field.HasField("oneof_index"):
        return "no oneof"
    return f"oneof {message.oneof_decl[field.oneof_index].name}"


# -- enums and services ----------------------------------------------------------------------------------------------


def _enums(before: FileDescriptorSet, now: FileDescriptorSet) -> Iterator[str]:
    present = dict(_all_enums(now))
    for name, old in _all_enums(before):
        if (new := present.get(name)) is None:
            yield f"{name}: the enum is gone"
            continue
        values = {value.number: value.name for value in new.value}
        for value in old.value:
            where = f"{name}.{value.name}"
            if value.number not in values:
                ranges = [range(one.start, one.end + 1) for one in new.reserved_range]  # inclusive, for enums
                yield from _removed(where, "value", value.number, value.name, ranges, new)
            elif values[value.number] != value.name:
                yield f"{where} = {value.number}: is called {values[value.number]} now"


def _services(before: FileDescriptorSet, now: FileDescriptorSet) -> Iterator[str]:
    present = dict(_top(now, "service"))
    for name, old in _top(before, "service"):
        calls = {call.name: call for call in present[name].method} if name in present else {}
        for call in old.method:
            where = f"{name}/{call.name}"
            if (new := calls.get(call.name)) is None:
                yield f"{where}: the call is gone"
                continue
            for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
                if getattr(new, what) != getattr(call, what):
                    yield f"{where}: {what} was {getattr(call, what)}, is {getattr(new, what)}"


# -- walking ---------------------------------------------------------------------------------------------------------


def _top(found: FileDescriptorSet, kind: str) -> Iterator[tuple[str, Any]]:
    for file in found.file:
        for one in getattr(file, kind):
            yield f"{file.package}.{one.name}", one


def _all_messages(found: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    for name, message in _top(found, "message_type"):
        yield from _nested(name, message)


def _nested(name: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    yield name, message
    for inner in message.nested_type:
        yield from _nested(f"{name}.{inner.name}", inner)


def _all_enums(found: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    yield from _top(found, "enum_type")
    for name, message in _all_messages(found):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _reserved(message: DescriptorProto) -> list[range]:
    return [range(one.start, one.end) for one in message.reserved_range]


def _numbers(ranges: Iterable[range]) -> set[int]:
    """The numbers of all ranges; of one that reaches to the end (`5 to max`), the first 10,000."""
    return {number for one in ranges for number in one[:10_000]}


# -- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m protos.breaking", description="Compare with the last release.")
    parser.add_argument("--release", action="store_true", help="write the contract of pyproject.toml's version")
    release = parser.parse_args(argv).release
    now = compiled()
    if release and not any(RELEASED.glob("*.binpb")):
        return _keep(now)
    last = newest_release()
    found = breaks(FileDescriptorSet.FromString(last.read_bytes()), now)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print(f"{len(found)} breaks with {last.stem}: peers of that release would not understand", file=sys.stderr)
        return 1
    if release:
        return _keep(now)
    print(f"compatible with {last.stem}")
    return 0


def _keep(now: FileDescriptorSet) -> int:
    version = tomllib.loads((PROTOS.parent / "pyproject.toml").read_text())["project"]["version"]
    path = RELEASED / f"{version}.binpb"
    if path.exists():
        print(f"{version} was released already: give pyproject.toml its next version first", file=sys.stderr)
        return 1
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(now.SerializeToString(deterministic=True))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
