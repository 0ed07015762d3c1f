"""Only the model's own modules change what a coordinator remembers.

Two checks hold together. Containers of the model are typed as read-only views (`Mapping`), so that mypy refuses their
changes under any name. This test parses the coordinator's other modules: none assigns an attribute that the model
defines, changes a container in one, or reaches for it by `setattr` or `vars`. Private attributes are ruff's (SLF001).
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ebbtide import coordinator

ROOT: Final = Path(coordinator.__file__).parent
#: The modules whose classes are the model.
MODEL: Final = frozenset(
    {
        "state/coordinator_state.py", "state/notifier.py", "state/run_episodes.py", "state/run_mirror.py",
        "state/run_state.py", "state/run_versions.py", "state/running_attempt.py", "state/worker_session.py",
    }
)  # fmt: skip
#: Methods that change a dict, list, set, deque, Counter, queue or event, and those of a `RolloutQueue`.
CHANGING: Final = frozenset(
    {
        "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem",
        "popleft", "put", "put_nowait", "remove", "reverse", "rotate", "set", "setdefault", "sort", "subtract", "take",
        "update", "__setitem__", "__delitem__",
    }
)  # fmt: skip
BY_NAME: Final = frozenset({"setattr", "delattr", "vars", "force_setattr", "__setattr__", "__delattr__", "__dict__"})


def attributes(source: str) -> set[str]:
    """The public attributes that the classes of a module define."""
    found: set[str] = set()
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef):
            continue
        found |= {
            one.target.id for one in owner.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return {name for name in found if not name.startswith("_")}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class Writes(ast.NodeVisitor):
    """Finds what a module writes to attributes of the model. Local names of its containers count as the containers."""

    def __init__(self, names: set[str]) -> None:
        self._names, self._aliases = names, set[str]()
        self.found: list[tuple[int, str]] = []

    def _ours(self, node: ast.AST) -> bool:
        """Whether an expression is an attribute of the model, or a local name for one, or an element of either."""
        if isinstance(node, ast.Subscript):
            return self._ours(node.value)
        if isinstance(node, ast.Name):
            return node.id in self._aliases
        return isinstance(node, ast.Attribute) and node.attr in self._names and not is_self(node.value)

    def _note(self, node: ast.AST) -> None:
        self.found.append((getattr(node, "lineno", 0), ast.unparse(node)))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._aliases = self._aliases, set(self._aliases)
        self.generic_visit(node)
        self._aliases = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as `ast` names it

    def visit_Assign(self, node: ast.Assign) -> None:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs += zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]  # type: ignore[attr-defined]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                (self._aliases.add if self._ours(value) else self._aliases.discard)(target.id)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        (self._aliases.add if self._ours(node.value) else self._aliases.discard)(node.target.id)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        stored = isinstance(node.ctx, ast.Store | ast.Del) and self._ours(node)
        if stored or node.attr in BY_NAME:
            self._note(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del) and self._ours(node.value):
            self._note(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=container, attr=method):
                changes = method in CHANGING and self._ours(container)
            case ast.Name(id=name):
                changes = name in BY_NAME and not (node.args and is_self(node.args[0]))
            case _:
                changes = False
        if changes:
            self._note(node.func)
        self.generic_visit(node)


def violations(source: str, names: set[str]) -> list[tuple[int, str]]:
    writes = Writes(names)
    writes.visit(ast.parse(source))
    return writes.found


@pytest.fixture(scope="module")
def names() -> set[str]:
    return set[str]().union(*(attributes((ROOT / module).read_text()) for module in MODEL))


def others() -> Iterator[Path]:
    """All but the model's own modules, and the rules and forecasts, which change nothing of it."""
    paths = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py")))
    return (ROOT / path for path in paths if path not in MODEL and not path.startswith(("rules/", "forecasts/")))


def test_no_module_but_the_models_writes_to_a_session_a_run_or_an_attempt(names: set[str]) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in others()
        for line, text in violations(path.read_text(), names)
    }
    assert not found, "give the model a method named after what happened"


@pytest.mark.parametrize(
    "planted",
    [
        "run.mirror.stale = True",
        "run.mirror.stale |= late",
        "session.state, session.draining = WorkerState.DRAINING, True",
        "del attempt.orphaned",
        "self._state.runs[run_id] = run",
        "del run.running[rollout_id]",
        "run.queue.remove(rollout_id)",
        "self._state.sessions.pop(session_id)",
        "session.outbox.put_nowait(None)",
        "run.mirror.reconciled.set()",
        "running = run.running\nrunning.clear()",
        "if (held := session.held):\n    held.clear()",
        "a, queue = 1, run.queue\nqueue.add(entry)",
        "for session.reason in reasons: pass",
        "with opened as session.target: pass",
        "setattr(run, 'stale', True)",
        "vars(run)['stale'] = True",
        "run.__dict__['stale'] = True",
        "object.__setattr__(run, 'stale', True)",
        "self._state.incarnation.over.set()",
    ],
)
def test_a_planted_write_is_found(planted: str, names: set[str]) -> None:
    body = planted.replace("\n", "\n        ")
    assert violations(f"class Dispatcher:\n    def decide(self):\n        {body}\n", names)


def test_reads_and_an_objects_own_attributes_are_allowed(names: set[str]) -> None:
    source = "stale = run.mirror.stale\nself.state = stale\nlisted = [*run.queue]\nlisted.append(1)\n"
    source += "await run.mirror.reconciled.wait()"
    assert not violations(source, names)
