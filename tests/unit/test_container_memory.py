"""A container's limit on memory bounds what a program may take, whatever the host has."""

from pathlib import Path

import pytest

from ebbtide.gpu_memory import container_memory


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file 30\nactive_file 9"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "inactive_file 9\ntotal_inactive_file 30"),
    ],
)
def test_file_cache_counts_as_left(limit: str, used: str, stat: str, tmp_path: Path) -> None:
    for name, text in ((limit, "1000\n"), (used, "400\n"), (str(Path(limit).with_name("memory.stat")), stat)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_memory(tmp_path) == 1000 - 400 + 30


def test_no_limit_leaves_more_than_any_machine_has(tmp_path: Path) -> None:
    assert container_memory(tmp_path) > 1 << 60
    for name, text in (("memory.max", "max\n"), ("memory.current", "400\n"), ("memory.stat", "inactive_file 30\n")):
        (tmp_path / name).write_text(text)
    assert container_memory(tmp_path) > 1 << 60
