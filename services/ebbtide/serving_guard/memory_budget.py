"""Divides memory, not steps, between serving and the borrowers: reads what is free, and asks the rules of `memory`.

Invariant: the KV cache that all borrowers may hold, that of serving and a headroom for serving's growth together never
exceed the stated limit for the pair. Memory that cannot be read counts as none. Serving's use is computed from the
tokens inside if its traffic passes the guard, and read from the engine's metrics otherwise. On a GPU the device reports
its free memory: vLLM never shrinks its KV cache, so only sleep frees memory there. The place of the
weights is a wish: an engine that cannot fulfil it goes on. Of several borrowers on a device one moves at a time: what
is promised to one, or about to be freed by it, is no reason for another to move.
"""

from collections.abc import Callable
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import Device, host_memory, open_device
from ebbtide.serving_guard.borrowers import UNREADABLE, AllowedMemory
from ebbtide.serving_guard.governor.memory import (
    NORMAL,
    DeviceMemory,
    KvAllowance,
    KvBudget,
    ResidencyPlan,
    waking_pays,
)
from ebbtide.types.grants import BorrowerReport, Hello, Residency

log = telemetry.get_logger(__name__)

#: Share of a device's memory, or of the host's, that stays free for serving.
_RESERVE: Final = 0.03
#: On a host, where only a limit for KV cache is stated, weights return when this share of it is free.
_ROOM: Final = 0.1


class _Borrower:
    def __init__(self, hello: Hello, device: Device | None) -> None:
        self.hello, self.device = hello, device
        # What its first report will say: without slots the engine is not there yet.
        self.report = BorrowerReport(residency=Residency.AWAKE if hello.slots else Residency.AWAY)
        self.weights = ResidencyPlan()
        self.wish = self.report.residency  # as last granted
        self.rising = False  # it was told to come to the device, and may be on its way
        self.unreadable = False
        self.needs = 0  # bytes of KV cache of one rollout, as last seen while nothing limited them


class MemoryBudget:
    """Divides memory between serving and the borrowers. `now` is in seconds of the monotonic clock."""

    def __init__(
        self,
        *,
        limit_mib: int = 0,
        serving_kv_mib: int = 0,
        bytes_per_token: int = 0,
        device: Callable[[str], Device | None] = open_device,
        host: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`limit_mib`: for the KV cache of both engines, 0: none; `serving_kv_mib`: the served engine's part of it;
        `bytes_per_token`: of the served model. Raises `InvalidRequest` if they do not fit each other."""
        if limit_mib and not (serving_kv_mib or bytes_per_token):
            message = "needs serving_kv_bytes_per_token (proxy) or serving_kv_mib (observe) to know what serving uses"
            raise InvalidRequest(message, field="memory_limit_mib")
        if limit_mib and serving_kv_mib > limit_mib:
            raise InvalidRequest("must be at least serving_kv_mib, which serving may use", field="memory_limit_mib")
        self.limit = limit_mib << 20
        self.serving_bytes = 0
        self._pool = serving_kv_mib << 20
        self._bytes_per_token = bytes_per_token
        self._open = device
        self._host = host or host_memory
        self._budget = KvBudget()
        self._borrowers: dict[str, _Borrower] = {}

    def tokens_inside(self, now: float, tokens: int) -> None:
        """Mode proxy: `tokens` is the sum of prompts and answers so far, over all requests inside."""
        used = tokens * self._bytes_per_token
        self._serving(now, min(used, self._pool) if self._pool else used)

    def usage(self, now: float, share: float) -> None:
        """Mode observe: the served engine uses this share of its pool (`vllm:kv_cache_usage_perc`, 0 to 1)."""
        self._serving(now, int(share * self._pool))

    def joined(self, worker_id: str, hello: Hello) -> None:
        """Add a borrower, or replace it. Raises `InvalidRequest` if its device cannot be read."""
        self._borrowers[worker_id] = _Borrower(hello, self._open(hello.device) if hello.device else None)

    def left(self, worker_id: str) -> None:
        self._borrowers.pop(worker_id, None)

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None:
        """Take a borrower's report; its KV cache counts at once."""
        if (borrower := self._borrowers.get(worker_id)) is not None:
            borrower.report = report
            borrower.rising = borrower.rising or (report.moving and not borrower.hello.slots)  # by a former guard
            if self._allowance(now).phase == NORMAL and report.running:
                borrower.needs = report.kv_bytes_used // report.running

    def allowed(self, now: float, worker_id: str, *, idle_s: float) -> AllowedMemory:
        """The memory in its next grant. `idle_s`: how long borrowing will probably be possible, 0 while it is not.
        Raises `KeyError` for an unknown borrower."""
        borrower = self._borrowers[worker_id]
        allowance = self._allowance(now)
        try:
            at = self._residency(now, borrower, allowance, idle_s)
        except Exception as error:  # noqa: BLE001 - whatever fails in NVML or the system, users' requests go on
            if not borrower.unreadable:
                log.warning("memory cannot be read: nothing is granted", worker_id=worker_id, reason=str(error))
            borrower.unreadable = True
            return AllowedMemory(0, UNREADABLE, borrower.report.residency)
        borrower.unreadable, borrower.wish = False, at
        borrower.rising = _rises(borrower, at)
        full = sum(other.hello.kv_bytes for other in self._borrowers.values())
        share = allowance.kv_bytes * borrower.hello.kv_bytes // full if full else 0
        # A device keeps the KV cache as long as the weights: taking it from an awake engine would free nothing.
        return AllowedMemory(share if at is Residency.AWAKE or borrower.device else 0, allowance.phase, at)

    def _serving(self, now: float, used: int) -> None:
        self.serving_bytes = used
        if self._borrowers:
            self._allowance(now)

    def _held(self) -> int:
        return sum(borrower.report.kv_bytes_used for borrower in self._borrowers.values())

    def _allowance(self, now: float) -> KvAllowance:
        full = sum(borrower.hello.kv_bytes for borrower in self._borrowers.values())
        if not self.limit:
            return KvAllowance(full, NORMAL)
        # Each borrower's share is in proportion to what it could hold: enough for one of its rollouts, or nothing.
        least = max((_needed(one, full) for one in self._borrowers.values()), default=0)
        return self._budget.update(
            now, serving=self.serving_bytes, rollout=self._held(), limit=self.limit, full=full, least=least
        )

    def _residency(self, now: float, borrower: _Borrower, allowance: KvAllowance, idle_s: float) -> Residency:
        report = borrower.report
        memory = self._on_device(borrower) if borrower.device else self._on_host(allowance)
        at = borrower.weights.decide(
            now,
            at=report.residency,
            memory=memory,
            idle_s=idle_s,
            wake_host_s=report.wake_host_s,
            wake_away_s=report.wake_away_s,
        )
        # What it has taken on its way is no reason to turn back; a waking engine does if serving wants the device.
        wanted = not borrower.hello.slots or waking_pays(
            report.residency, idle_s=idle_s, wake_host_s=report.wake_host_s, wake_away_s=report.wake_away_s
        )
        on = borrower.rising and report.moving and at is report.residency and memory.short <= 0 and wanted
        return Residency.AWAKE if on else at

    def _on_host(self, allowance: KvAllowance) -> DeviceMemory:
        room = int(self.limit * _ROOM)
        spare = max(0, self.limit - self.serving_bytes) if self.limit else 0
        return DeviceMemory(short=allowance.short, spare=spare, weights=room)

    def _on_device(self, borrower: _Borrower) -> DeviceMemory:
        hello, device = borrower.hello, borrower.device
        free, total = device.memory() if device else (0, 0)
        host_free, host_total = self._host()
        reserve, host_reserve = int(total * _RESERVE), int(host_total * _RESERVE)
        coming, going = self._moving_beside(borrower)
        return DeviceMemory(
            short=max(0, reserve - free - going),
            spare=max(0, free - reserve - coming),
            weights=hello.weights_bytes + hello.kv_bytes,
            host_short=max(0, host_reserve - host_free),
            host_spare=max(0, host_free - host_reserve),
            device=True,
        )

    def _moving_beside(self, borrower: _Borrower) -> tuple[int, int]:
        """Bytes that other borrowers of its device were told to take, and to give up, and have not yet."""
        coming = going = 0
        for other in self._borrowers.values():
            if other is borrower or other.hello.device != borrower.hello.device:
                continue
            needed, awake = other.hello.weights_bytes + other.hello.kv_bytes, other.report.residency is Residency.AWAKE
            coming += needed if other.rising and not awake else 0
            going += needed if other.wish is not Residency.AWAKE and awake else 0
        return coming, going


def _rises(borrower: _Borrower, at: Residency) -> bool:
    """Whether it is on its way to the device with this wish, or goes on in spite of it: a boot does not turn back."""
    report = borrower.report
    return report.residency is not Residency.AWAKE and (at is Residency.AWAKE or (borrower.rising and report.moving))


def _needed(borrower: _Borrower, full: int) -> int:
    """The bytes for all borrowers at which this one's share is enough for one of its rollouts."""
    return -(-borrower.needs * full // borrower.hello.kv_bytes) if borrower.hello.kv_bytes > 0 else 0
