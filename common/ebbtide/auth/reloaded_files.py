"""Rebuilds values when their files change: operators replace tokens, keys and certificates while programs run."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ebbtide.errors import InvalidRequest

log = logging.getLogger(__name__)

T = TypeVar("T")


class ReloadedFiles(Generic[T]):
    """`get()` returns what `make` makes of the present files. While they are unusable (half of a pair was replaced, a
    file is gone) it returns the last value, and logs this once. It costs a microsecond or two per file.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        """Raises what `make` raises."""
        self._paths, self._make = [Path(path) for path in paths if path], make
        self._seen = self._state()
        self._value = make()

    def get(self) -> T:
        state = self._state()
        if state != self._seen:
            self._seen = state  # taken before the files are read, so a change meanwhile is seen next time
            try:
                self._value = self._make()
            except InvalidRequest as error:
                log.warning("a changed file cannot be used, so its former content stays in use: %s", error)
        return self._value

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
