"""What must always hold, checked after every command that the store has done, and what must hold in the end.

The store's own data is looked at, not what anybody says of it: the state, the attempt and the tokens of each rollout.
"""

import json
import math
from typing import Any, Final

import numpy as np

from ebbtide.store.lua_scripts import script
from ebbtide.store.store_keys import run_key
from ebbtide.types.tokens import TOKEN, TOKEN_BYTES
from tests.simulation.engine import TAG_MASK, tag_of
from tests.simulation.loop import Proc, SimLoop
from tests.simulation.plan import Plan, Wanted, batch_of
from tests.simulation.store import Server
from tests.simulation.trainer import RUN, Journal

_MOVES: Final = {
    ("", "queued"),
    ("queued", "running"),
    ("running", "queued"),
    ("running", "finished"),
    *((state, "") for state in ("queued", "running", "finished")),
}
#: Scripts that write under a term, and of these, those that act for the holder of a lease: (term, role, fence, ...).
_LEASED: Final = frozenset(
    {"submit", "acknowledge", "cancel", "complete", "commit", "announce_version", "reserve_version"}
)
#: What the append script answers for a delta of an attempt that was superseded.
_REFUSED: Final = 3
#: Workers and leases have sent again what the store lost so long after it came back.
_DOUBT_S: Final = 60.0
_WRITERS: Final = _LEASED | {"append", "place", "requeue", "dead_letter", "lease_claim"}


class Seen:
    """A rollout as it was after the last command."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        name = wanted.request.rollout_id
        self.row, self.tokens = run_key(RUN, "ROLLOUT", name).encode(), run_key(RUN, "TOKENS", name).encode()
        self.field = b"r:" + name.encode()
        self.state = self.attempt = ""
        self.stored = 0
        self.attempts = 0


class Monitor:
    """`wrong` is the first thing found; the run is not worth looking at behind it."""

    def __init__(self, loop: SimLoop, plan: Plan, journal: Journal) -> None:
        self._loop, self._plan, self._journal = loop, plan, journal
        self.store: Server | None = None
        self.wrong = ""
        self.rollouts = {name: Seen(wanted) for name, wanted in plan.wanted.items()}
        self.forgot_at = -math.inf  # when the store last lost something
        self.durable: dict[str, int] = {}  # rollout -> tokens of it that a coordinator called durable
        self.ended: set[str] = set()  # rollouts whose end it called durable
        self.letters: set[str] = set()  # rollouts that the store has, or had until they were settled, as dead letters
        self.buried: set[str] = set()  # and those that it ever had so
        self._known: set[int] = set()  # versions
        self.generated: dict[str, int] = {}  # by attempt
        self.owner: dict[str, Proc] = {}  # attempt -> who generates
        self.of: dict[str, str] = {}  # attempt -> rollout
        self.starts: dict[str, int] = {}  # attempt -> stored at its begin
        self._names = {key: name for name, one in self.rollouts.items() for key in (one.row, one.tokens, one.field)}
        self._order = {name: place for place, name in enumerate(self.rollouts)}
        self._fenced = False
        self._fence = run_key(RUN, "FENCE").encode()
        self._versions = run_key(RUN, "VERSIONS").encode()
        self._done, self._run = run_key(RUN, "DONE").encode(), run_key(RUN, "RUN").encode()
        self._count = run_key(RUN, "COUNT").encode()
        self._stale = ""
        self._old: dict[int, str] = {}
        self._scripts = {key: name for name in _WRITERS for key in (script(name).sha, script(name).text)}
        self.on_state: Any = lambda name, before, after: None
        self.on_loss: Any = lambda name, attempt, lost: None

    def fail(self, text: str) -> None:
        if not self.wrong:
            self.wrong = f"{self._loop.now:.4f} s: {text}"

    # -- after each command --------------------------------------------------------------------------------------

    def seen(self, command: list[bytes], reply: Any) -> None:
        if command[0][:4].upper() != b"EVAL":
            return
        self._check_stale(command, reply)
        assert self.store is not None
        touched = self.store.touched
        if (self._fence in self.store.data) is not self._fenced:
            self._fenced = not self._fenced
            self.look(list(self.rollouts))
        elif names := {self._names[key] for key in touched & self._names.keys()}:
            self.look(sorted(names, key=self._order.__getitem__))
        touched.clear()

    def look(self, names: list[str]) -> None:
        """Hold these rollouts, as the store has them now, against what they were."""
        assert self.store is not None
        data = self.store.data
        fences = data.get(self._fence)
        running = fences.value._values if fences is not None else {}
        for name in names:
            if name not in self._journal.requests:
                continue
            one = self.rollouts[name]
            row, tokens = data.get(one.row), data.get(one.tokens)
            values = row.value._values if row is not None else {}
            state = values.get(b"state", b"").decode()
            attempt = values.get(b"attempt", b"").decode()
            stored = len(tokens.value) // TOKEN_BYTES if tokens is not None else 0
            if (state, attempt, stored) != (one.state, one.attempt, one.stored):
                self._changed(name, one, state, attempt, stored, tokens.value if tokens is not None else b"")
            if fences is not None and (one.field in running) != (state == "running"):
                self.fail(f"{name} is {state or 'gone'}, and its fence says {running.get(one.field)!r}")

    def _changed(self, name: str, one: Seen, state: str, attempt: str, stored: int, tokens: bytes) -> None:
        before = one.state
        if state != before and (before, state) not in _MOVES and not self._buried(name, before, state):
            self.fail(f"{name} went from {before or 'nothing'} to {state or 'nothing'}")
        if state == before == "running" and attempt != one.attempt and not self.forgetful:
            self.fail(f"{name} was given to {attempt} while {one.attempt} still had it")
        if state != before:
            self._began_or_ended(name, one, state, attempt, stored)
        if state and stored < one.stored:
            self.fail(f"{name} lost tokens: {one.stored} were stored, now {stored}")
        if stored > one.stored:
            if before != "running" or state not in {"running", "finished"}:
                self.fail(f"{name} got tokens while it was {before}")
            self._check_tokens(name, one, tokens)
        if state == "finished" and before == "running" and stored != one.wanted.length:
            self.fail(f"{name} finished with {stored} of {one.wanted.length} tokens")
        if not state and before and not self._over(name):
            self.fail(f"{name} vanished while it was {before}")
        one.state, one.attempt, one.stored = state, attempt, stored
        if state != before:
            self.on_state(name, before, state)

    def _began_or_ended(self, name: str, one: Seen, state: str, attempt: str, stored: int) -> None:
        if state == "running":
            self.of[attempt] = name
            self.starts.setdefault(attempt, stored)
            one.attempts += 1
        elif state == "queued" and one.state == "running":
            self.on_loss(name, attempt, self.starts[attempt] + self.generated.get(attempt, 0) - stored)

    def _buried(self, name: str, before: str, state: str) -> bool:
        """Whether it is rightly a dead letter: a store that forgot has later versions than it takes, and none of those
        that it takes. Its publisher says a forgotten one again; one that died with the store does not.
        """
        assert self.store is not None
        if not self.forgetful or (before, state) != ("queued", "finished"):
            return False
        row, announced = self.store.data[self.rollouts[name].row].value._values, self.store.data.get(self._versions)
        versions = {int(key) for key in announced.value._values} if announced is not None else set()
        request = self._journal.requests[name]
        above = 0 < request.max_version < max(versions, default=0)
        within = any(request.min_version <= version <= request.max_version for version in versions)
        if row.get(b"reason") != b"DEAD_LETTERED" or not above or within:
            return False
        self.letters.add(name)
        self.buried.add(name)
        return True

    def _over(self, name: str) -> bool:
        assert self.store is not None
        data = self.store.data
        done, run = data.get(self._done), data.get(self._run)
        first_step = int(run.value._values.get(b"first_step", 0)) if run is not None else 0
        marked = done is not None and b"r:" + name.encode() in done.value
        return self._fence not in data or marked or batch_of(name) < first_step

    def _check_tokens(self, name: str, one: Seen, tokens: bytes) -> None:
        new = np.frombuffer(tokens, dtype=TOKEN)[one.stored :]
        wanted, first, last = one.wanted, one.stored, one.stored + len(new)
        if last > wanted.length:
            self.fail(f"{name} has {last} tokens, {wanted.length} are right")
            return
        bits = new["logprob"].view("<u4")
        if (new["id"] != wanted.ids[first:last]).any() or (
            (bits & ~np.uint32(TAG_MASK)) != wanted.bits[first:last]
        ).any():
            self.fail(f"{name} has wrong tokens between {first} and {last}")
        tags = set((bits & TAG_MASK).tolist())
        makers = [attempt for attempt, of in self.of.items() if of == name] if self.forgetful else [one.attempt]
        if not tags <= {*map(tag_of, makers)}:
            self.fail(f"{name} got tokens of another attempt than {one.attempt}, which has it")
        self._check_versions(name, set(new["version"].tolist()))

    def _check_versions(self, name: str, versions: set[int]) -> None:
        self.learn_versions()
        known = self._known
        request = self._journal.requests[name]
        for version in versions:
            within = request.min_version <= version and not 0 < request.max_version < version
            if version not in known or not within:
                self.fail(
                    f"{name} got tokens of version {version}: known {sorted(known)}, wanted {request.min_version}+"
                )

    # -- a store that comes back knowing less --------------------------------------------------------------------

    @property
    def forgetful(self) -> bool:
        """Whether the store has lost something: what was not durable may then happen again."""
        return self.forgot_at >= 0

    @property
    def doubtful(self) -> bool:
        """Whether it was so lately that not all has been sent again."""
        return self._loop.now - self.forgot_at < _DOUBT_S

    def learn_versions(self) -> None:
        assert self.store is not None
        announced = self.store.data.get(self._versions)
        self._known |= {int(key) for key in announced.value._values} if announced is not None else set()

    def forgot(self) -> None:
        """The store lost its newest: take what it has now as given, unless it lost what was called durable."""
        assert self.store is not None
        self.forgot_at, data = self._loop.now, self.store.data
        self._fenced = self._fence in data
        for name, one in self.rollouts.items():
            row, tokens = data.get(one.row), data.get(one.tokens)
            values = row.value._values if row is not None else {}
            one.state, one.attempt = values.get(b"state", b"").decode(), values.get(b"attempt", b"").decode()
            one.stored = len(tokens.value) // TOKEN_BYTES if tokens is not None else 0
            if name not in self._journal.requests or (not one.state and self._over(name)):
                continue
            if one.stored < self.durable.get(name, 0):
                self.fail(f"{name} has {one.stored} tokens left, {self.durable[name]} were called durable")
            if one.state != "finished":
                self.letters.discard(name)
            if name in self.ended and one.state != "finished":
                self.fail(f"{name} is {one.state or 'gone'}, its end was called durable")
        self.store.touched.clear()

    def before(self, command: list[bytes]) -> None:
        """A command is about to be done: whether it may be, by its term and lease."""
        self._stale, self._old = "", {}
        if command[0].upper() not in {b"EVALSHA", b"EVAL"} or len(command) < 5:
            return
        assert self.store is not None
        fences = self.store.data.get(self._fence)
        if fences is None or self._scripts.get(command[1], "") not in _WRITERS:
            return
        have = fences.value._values
        if command[4] != have[b"term"]:
            self._stale = "a coordinator that was superseded"
        elif self._scripts[command[1]] == "append":
            self._old = self._old_attempts(command[5])
        elif self._scripts[command[1]] in _LEASED and command[6] != have.get(b"lease:" + command[5]):
            self._stale = "a lease holder that was superseded"

    def _check_stale(self, command: list[bytes], reply: Any) -> None:
        if self._stale and not isinstance(reply, Exception):
            self.fail(f"{self._scripts[command[1]]} was done for {self._stale}")
        if self._old and isinstance(reply, list):
            refused = {place - 1 for place, status in zip(reply[::4], reply[1::4], strict=True) if status == _REFUSED}
            for place in self._old.keys() - refused:
                self.fail(f"an append was taken that is not of the attempt which has {self._old[place]}")

    def _old_attempts(self, columns: bytes) -> dict[int, str]:
        """Deltas of an append, by their place, whose rollout another attempt has, or none."""
        ids, attempts, *_ = json.loads(columns)
        return {
            place: name
            for place, (name, attempt) in enumerate(zip(ids, attempts, strict=True))
            if self.rollouts[name].state == "queued" or self.rollouts[name].attempt != attempt
        }

    # -- what workers do -----------------------------------------------------------------------------------------

    def token(self, proc: Proc, attempt_id: str, version: int) -> None:
        self.owner[attempt_id] = proc
        self.generated[attempt_id] = self.generated.get(attempt_id, 0) + (version > 0)

    def released(self, attempt_id: str) -> None:
        """A worker hands an attempt back: all that it generated must be stored."""
        name = self.of.get(attempt_id)
        if (
            self.doubtful
            or name is None
            or self.rollouts[name].attempt != attempt_id
            or self.rollouts[name].state != "running"
        ):
            return
        made = self.starts[attempt_id] + self.generated.get(attempt_id, 0)
        if made != self.rollouts[name].stored:
            self.fail(f"{name} was handed back with {self.rollouts[name].stored} of {made} tokens stored")
