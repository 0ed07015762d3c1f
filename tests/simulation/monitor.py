"""What must always hold, checked after every command that the store has done, and what must hold in the end.

The store's own data is looked at, not what anybody says of it: the state, the attempt and the tokens of each rollout of
each run. All runs use the same ids, so that one run's data in another's place does not go unseen.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ebbtide.store.scripts import script
from ebbtide.types.tokens import TOKEN, TOKEN_BYTES
from tests.simulation.engine import TAG_MASK, tag_of
from tests.simulation.leadership import Leadership
from tests.simulation.loop import Proc, SimLoop
from tests.simulation.plan import key_of
from tests.simulation.run_view import RunView, Seen
from tests.simulation.store import Server
from tests.simulation.trainer import Journal

_MOVES: Final = {
    ("", "queued"),
    ("queued", "running"),
    ("running", "queued"),
    ("running", "finished"),
    *((state, "") for state in ("queued", "running", "finished")),
}
#: Scripts that write to a run under a term; and of these, those that act for the holder of a lease if they name a role:
#: (term, role, fence, ...).
_LEASED: Final = frozenset(
    {
        "submit", "acknowledge", "cancel", "complete", "commit", "announce_version", "reserve_version", "lease_renew",
        "end_run", "report",
    }
)  # fmt: skip
_WRITERS: Final = _LEASED | {
    "append", "place", "requeue", "dead_letter", "adopt", "settle", "tally", "lease_claim", "lease_release",
}  # fmt: skip
#: What the append script answers for a delta of an attempt that was superseded.
_REFUSED: Final = 3
#: Workers and leases have sent again what the store lost so long after it came back.
_DOUBT_S: Final = 60.0


class Monitor:
    """`wrong` is the first thing found; the seed is not worth looking at behind it. Rollouts are named by `key_of`."""

    def __init__(self, loop: SimLoop, journals: Iterable[Journal]) -> None:
        self._loop = loop
        self.store: Server | None = None
        self.wrong = ""
        self.runs = {journal.plan.run_id: RunView(journal) for journal in journals}
        self.rollouts = {one.name: one for run in self.runs.values() for one in run.rollouts.values()}
        self.leadership = Leadership(loop, self.fail)
        self.forgot_at = -math.inf  # when the store last lost something
        self.durable: dict[str, int] = {}  # rollout -> tokens of it that a coordinator called durable
        self.ended: set[str] = set()  # rollouts whose end it called durable
        self.letters: set[str] = set()  # rollouts that the store has, or had until they were settled, as dead letters
        self.buried: set[str] = set()  # and those that it ever had so
        self.generated: dict[str, int] = {}  # by attempt
        self.owner: dict[str, Proc] = {}  # attempt -> who generates
        self.of: dict[str, str] = {}  # attempt -> rollout
        self.starts: dict[str, int] = {}  # attempt -> stored at its begin
        self._names: dict[bytes, list[Seen]] = {}
        for one in self.rollouts.values():
            for key in (one.row, one.tokens, one.field):
                self._names.setdefault(key, []).append(one)
        self._order = {name: place for place, name in enumerate(self.rollouts)}
        self._prefixes = {run.prefix: run for run in self.runs.values()}
        self._stale = ""
        self._old: dict[int, str] = {}
        self._scripts = {key: name for name in _WRITERS for key in (script(name).sha, script(name).text)}
        self.on_state: Any = lambda name, before, after: None
        self.on_loss: Any = lambda name, attempt, lost: None
        self.on_token: Any = lambda proc, run: None

    def fail(self, text: str) -> None:
        if not self.wrong:
            self.wrong = f"{self._loop.now:.4f} s: {text}"

    # -- after each command --------------------------------------------------------------------------------------

    def seen(self, command: list[bytes], reply: Any) -> None:
        if command[0][:4].upper() != b"EVAL":
            return
        assert self.store is not None
        self.leadership.seen(command, reply, self.store.client)
        self._check_stale(command, reply)
        touched, data = self.store.touched, self.store.data
        changed = {one.name: one for key in touched & self._names.keys() for one in self._names[key]}
        for run in self.runs.values():
            if (run.fence in data) is not run.fenced:
                run.fenced = not run.fenced
                run.over_at = math.inf if run.fenced else self._loop.now
                changed.update((one.name, one) for one in run.rollouts.values())
        if changed:
            self.look(sorted(changed.values(), key=lambda one: self._order[one.name]))
        touched.clear()

    def look(self, rollouts: Iterable[Seen]) -> None:
        """Hold these rollouts, as the store has them now, against what they were."""
        assert self.store is not None
        data = self.store.data
        for one in rollouts:
            if one.rollout_id not in one.run.journal.requests:
                continue
            state, attempt, tokens = one.read(data)
            if (state, attempt, len(tokens) // TOKEN_BYTES) != (one.state, one.attempt, one.stored):
                self._changed(one, state, attempt, tokens)
            fences = one.run.fences(data)
            if fences is not None and (one.field in fences) != (state == "running"):
                self.fail(f"{one.name} is {state or 'gone'}, and its fence says {fences.get(one.field)!r}")

    def _changed(self, one: Seen, state: str, attempt: str, tokens: bytes) -> None:
        name, before, stored = one.name, one.state, len(tokens) // TOKEN_BYTES
        if state != before and (before, state) not in _MOVES and not self._buried(one, before, state):
            self.fail(f"{name} went from {before or 'nothing'} to {state or 'nothing'}")
        if state == before == "running" and attempt != one.attempt and not self.forgetful:
            self.fail(f"{name} was given to {attempt} while {one.attempt} still had it")
        if state != before:
            self._began_or_ended(one, state, attempt, stored)
        if state and stored < one.stored:
            self.fail(f"{name} lost tokens: {one.stored} were stored, now {stored}")
        if stored > one.stored:
            if before != "running" or state not in {"running", "finished"}:
                self.fail(f"{name} got tokens while it was {before}")
            self._check_tokens(one, tokens)
        if state == "finished" and before == "running" and stored != one.wanted.length:
            self.fail(f"{name} finished with {stored} of {one.wanted.length} tokens")
        if not state and before and not self._over(one):
            self.fail(f"{name} vanished while it was {before}")
        one.take(state, attempt, tokens)
        if state != before:
            self.on_state(name, before, state)

    def _began_or_ended(self, one: Seen, state: str, attempt: str, stored: int) -> None:
        if state == "running":
            if self.of.setdefault(attempt, one.name) != one.name:
                self.fail(f"{one.name} runs as {attempt}, which is an attempt of {self.of[attempt]}")
            self.starts.setdefault(attempt, stored)
            one.attempts += 1
        elif state == "queued" and one.state == "running":
            self.on_loss(one.name, attempt, self.starts[attempt] + self.generated.get(attempt, 0) - stored)

    def _buried(self, one: Seen, before: str, state: str) -> bool:
        """Whether it is rightly a dead letter: a store that forgot has later versions than it takes, and none of those
        that it takes. Its publisher says a forgotten one again; one that died with the store does not.
        """
        assert self.store is not None
        if not self.forgetful or (before, state) != ("queued", "finished"):
            return False
        data = self.store.data
        row, versions = data[one.row].value._values, one.run.versions(data)
        request = one.run.journal.requests[one.rollout_id]
        above = 0 < request.max_version < max(versions, default=0)
        within = any(request.min_version <= version <= request.max_version for version in versions)
        if row.get(b"reason") != b"DEAD_LETTERED" or not above or within:
            return False
        self.letters.add(one.name)
        self.buried.add(one.name)
        return True

    def _over(self, one: Seen) -> bool:
        assert self.store is not None
        return one.run.over(one.rollout_id, self.store.data)

    def _check_tokens(self, one: Seen, tokens: bytes) -> None:
        name, wanted, first = one.name, one.wanted, one.stored
        new = np.frombuffer(tokens, dtype=TOKEN)[first:]
        last = first + len(new)
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
        self._check_versions(one, set(new["version"].tolist()))

    def _check_versions(self, one: Seen, versions: set[int]) -> None:
        assert self.store is not None
        one.run.learn_versions(self.store.data)
        known, request = one.run.known, one.run.journal.requests[one.rollout_id]
        for version in versions:
            within = request.min_version <= version and not 0 < request.max_version < version
            if version not in known or not within:
                self.fail(
                    f"{one.name} got tokens of version {version}: known {sorted(known)}, wanted {request.min_version}+"
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
        for run in self.runs.values():
            run.learn_versions(self.store.data)

    def forgot(self) -> None:
        """The store lost its newest: take what it has now as given, unless it lost what was called durable."""
        assert self.store is not None
        self.forgot_at, data = self._loop.now, self.store.data
        for run in self.runs.values():
            run.fenced = run.fence in data
            run.over_at = math.inf if run.fenced else min(run.over_at, self._loop.now)
        for name, one in self.rollouts.items():
            one.take(*one.read(data))
            if one.rollout_id not in one.run.journal.requests or (not one.state and self._over(one)):
                continue
            if one.stored < self.durable.get(name, 0):
                self.fail(f"{name} has {one.stored} tokens left, {self.durable[name]} were called durable")
            if one.state != "finished":
                self.letters.discard(name)
            if name in self.ended and one.state != "finished":
                self.fail(f"{name} is {one.state or 'gone'}, its end was called durable")
        self.store.touched.clear()

    # -- who may write -------------------------------------------------------------------------------------------

    def before(self, command: list[bytes]) -> None:
        """A command is about to be done: whether it may be, by its term and lease."""
        self._stale, self._old = "", {}
        if command[0].upper() not in {b"EVALSHA", b"EVAL"} or len(command) < 5:
            return
        assert self.store is not None
        self.leadership.before(command, self.store.data)
        name, run = self._scripts.get(command[1], ""), self._prefixes.get(command[3])
        have = run.fences(self.store.data) if run is not None and name else None
        if run is None or have is None:
            return
        if command[4] != have[b"term"]:
            self._stale = "a coordinator that was superseded"
        elif name == "append":
            self._old = self._old_attempts(run, command[5])
        elif name in _LEASED and command[5] and command[6] != have.get(b"lease:" + command[5]):
            self._stale = "a lease holder that was superseded"

    def _check_stale(self, command: list[bytes], reply: Any) -> None:
        if self._stale and not isinstance(reply, Exception):
            self.fail(f"{self._scripts[command[1]]} was done for {self._stale}")
        if self._old and isinstance(reply, list):
            refused = {place - 1 for place, status in zip(reply[::4], reply[1::4], strict=True) if status == _REFUSED}
            for place in self._old.keys() - refused:
                self.fail(f"an append was taken that is not of the attempt which has {self._old[place]}")

    def _old_attempts(self, run: RunView, columns: bytes) -> dict[int, str]:
        """Deltas of an append, by their place, whose rollout another attempt has, or none."""
        ids, attempts, *_ = json.loads(columns)
        if strange := [name for name in ids if name not in run.rollouts]:
            self.fail(f"an append to {run.run_id} is of {strange}, which are no rollouts of it")
            return {}
        return {
            place: key_of(run.run_id, name)
            for place, (name, attempt) in enumerate(zip(ids, attempts, strict=True))
            if run.rollouts[name].state == "queued" or run.rollouts[name].attempt != attempt
        }

    # -- what workers do -----------------------------------------------------------------------------------------

    def token(self, proc: Proc, attempt_id: str, version: int, mark: float) -> None:
        """A worker begins an attempt (version 0), or made a token of it with weights that have this mark."""
        self.owner[attempt_id] = proc
        self.generated[attempt_id] = self.generated.get(attempt_id, 0) + (version > 0)
        if version and (name := self.of.get(attempt_id)) is not None:
            assert self.store is not None
            run = self.rollouts[name].run
            if (right := run.mark(version, self.store.data)) is not None and mark != right:
                self.fail(f"{name} was continued with weights {mark}; version {version} of its run has {right}")
            self.on_token(proc, run)

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
