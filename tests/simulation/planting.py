"""How a bug is planted into the code under test: a piece of a script's text or an attribute is replaced for a while."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from ebbtide.store import scripts

Bug = Callable[[], Any]
#: Scripts whose text is edited, where it is found; `lib` is part of all of them.
_NAMES: Final = (
    "acknowledge", "adopt", "append", "cancel", "commit", "complete", "dead_letter", "end_run", "lease_claim", "place",
    "report", "requeue", "submit", "submit_run", "reserve_version", "announce_version", "lead", "claim_term",
    "lease_renew",
)  # fmt: skip


def lua(*edits: tuple[str, str]) -> Bug:
    """Replace pieces of the scripts. Raises `ValueError` for a piece that no script has any more."""

    @contextmanager
    def planted() -> Iterator[None]:
        kept = {name: scripts.script(name) for name in _NAMES}
        before = {name: (one.text, one.sha) for name, one in kept.items()}
        try:
            for old, new in edits:
                hit = [name for name, one in kept.items() if old.encode() in one.text]
                if not hit:
                    raise ValueError(f"no script says {old!r} any more; plant this bug again")
                for name in hit:
                    made = scripts.LuaScript(name, kept[name].text.decode().replace(old, new))
                    vars(kept[name]).update(text=made.text, sha=made.sha)
            yield
        finally:
            for name, (text, sha) in before.items():
                vars(kept[name]).update(text=text, sha=sha)

    return planted


def python(*edits: tuple[Any, str, Any]) -> Bug:
    """Replace attributes, each by what a function makes of the one that is there."""

    @contextmanager
    def planted() -> Iterator[None]:
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in edits]
        try:
            for owner, name, make in edits:
                setattr(owner, name, make(owner.__dict__[name]))
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    return planted


def both(*bugs: Bug) -> Bug:
    """One mistake in several places."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for bug in bugs:
                stack.enter_context(bug())
            yield

    return planted
