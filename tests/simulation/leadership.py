"""Who leads the fleet, as the store has it, and what only that coordinator may do.

A standby takes the lease only once it is free. A coordinator that never led answers no calls, one whose lease is over
does not say that it serves, and what another one superseded changes nothing for the whole fleet. `Monitor` has the same
for each run.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from ebbtide.coordinator.election import TTL_S
from ebbtide.store.scripts import LEADER, TERM, script
from tests.simulation.loop import Proc, SimLoop

#: Scripts that compare the fleet's term, not that of a run.
_FLEET: Final = ("submit_run", "sweep_run", "claim_term", "delist", "drop_history", "keep_incarnation", "lead")
#: So long after its lease, or after it was woken, a coordinator may still say that it serves: it has to find out.
_FINDS_OUT_S: Final = 1.0
_SERVING: Final = b"\x08\x01"  # in the messages of gRPC's health service


class Leadership:
    """`holder`: who took or renewed the lease last."""

    def __init__(self, loop: SimLoop, fail: Callable[[str], None]) -> None:
        self._loop, self._fail = loop, fail
        self.holder: Proc | None = None
        self.changed = 0.0  # when another one took the lease
        self.takeovers = 0  # from one that did not give it back
        self._until: dict[Proc, float] = {}  # of those that ever led: until when their lease lasts
        self._scripts = {key: name for name in _FLEET for key in (script(name).sha, script(name).text)}
        self._wrong = ""

    def is_free(self, data: dict[bytes, Any], store_time: float) -> bool:
        """Whether nobody has the lease, by the store's clock."""
        lease = data.get(LEADER.encode())
        return lease is None or (lease.expireat is not None and lease.expireat <= store_time)

    def is_superseded(self, proc: Proc) -> bool:
        """Whether it led and another one took over: it can do nothing but end."""
        return proc in self._until and proc is not self.holder

    def before(self, command: list[bytes], data: dict[bytes, Any]) -> None:
        """A command is about to be done."""
        self._wrong = ""
        name = self._scripts.get(command[1]) if len(command) > 4 else None
        if name is None or (name == "lead" and command[7] == b"look"):
            return
        term, have = command[4], data.get(TERM.encode())
        if name == "lead" and command[7] in {b"seize", b"wait"}:
            held = not self.is_free(data, time.time())
            if command[7] == b"wait" and held and data[LEADER.encode()].value.partition(b" ")[0] != term:
                self._wrong = f"the lease was taken while {self.holder} had it"
        elif have is not None and have.value != term:
            self._wrong = f"{name} was done for a coordinator that was superseded"

    def seen(self, command: list[bytes], reply: Any, client: Proc | None) -> None:
        """It was done."""
        name = self._scripts.get(command[1]) if len(command) > 4 else None
        if name is None or isinstance(reply, Exception) or (name == "lead" and command[7] == b"look"):
            return
        if self._wrong and (name != "lead" or reply == b""):
            self._fail(self._wrong)
        if name == "lead" and client is not None and reply == b"":
            self._leads(client, command[7])

    def _leads(self, client: Proc, how: bytes) -> None:
        now = self._loop.now
        if how == b"release":
            self._until[client] = now
            return
        if self.holder is not client:
            self.takeovers += self.holder is not None and how == b"wait"
            self.holder, self.changed = client, now
        self._until[client] = now + TTL_S

    def answers(self, source: Proc, method: str, data: bytes) -> None:
        """A coordinator sends a message of an answer."""
        if not method.startswith("/grpc."):
            if source not in self._until:
                self._fail(f"{source} answers {method} and never led")
            return
        lapsed = max(self._until.get(source, 0.0), source.woken)
        if data == _SERVING and self._loop.now > lapsed + _FINDS_OUT_S:
            self._fail(f"{source} says that it serves, its lease was over at {lapsed:.2f} s")
