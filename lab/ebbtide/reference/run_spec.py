"""The page about the keys of a run's spec, from the structs that parse it."""

from collections.abc import Iterator
from typing import Final

from ebbtide.reference.field_tables import documented, field_table, paragraphs
from ebbtide.types.run import MAX_SPEC_BYTES, RunSpec

_HEAD: Final = f"""# Run spec

Every key of the TOML file that `ebbtide run submit` takes. Unknown keys are refused, with the one that was
probably meant. A spec has at most {MAX_SPEC_BYTES >> 10} KiB as JSON, so put data into files. Complete specs
are [`examples/compose.toml`](../../examples/compose.toml) and [the
demo's](../../services/ebbtide/local_cluster/demo.toml).
"""


def page() -> Iterator[str]:
    """Lines of docs/reference/run-spec.md."""
    yield from _HEAD.splitlines()
    yield ""
    fields = list(documented(RunSpec))
    yield from ("## Top level", "", *field_table([field for field in fields if field.struct is None]))
    for field in fields:
        if field.struct is not None:
            yield from (f"## `[{field.name}]`", "", *paragraphs(field.struct))
            yield from field_table(list(documented(field.struct)))
