"""Rollouts' share of memory falls by exactly what serving uses."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import Device, host_memory, open_device
from ebbtide.serving_guard.borrowers import UNREADABLE, AllowedMemory
from ebbtide.serving_guard.governor.memory import CUT, NORMAL
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import BorrowerReport, Hello, Residency

MIB = 1 << 20


def hello(kv_mib: int = 64, **changes: object) -> Hello:
    fields = {"protocol_version": 1, "worker_id": "w", "kv_bytes": kv_mib * MIB, "weights_bytes": 10 * MIB, "slots": 8}
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def stated() -> MemoryBudget:
    memory = MemoryBudget(limit_mib=100, serving_kv_mib=80, bytes_per_token=MIB)
    memory.joined("w", hello(90))
    return memory


class Gpu:
    def __init__(self, free: int, total: int = 1000) -> None:
        self.free, self.total = free, total
        self.lost = False

    def memory(self) -> tuple[int, int]:
        if self.lost:
            raise RuntimeError("GPU is lost")
        return self.free, self.total


def on_gpu(gpu: Device, host_free: int = 500) -> MemoryBudget:
    memory = MemoryBudget(device=lambda _: gpu, host=lambda: (host_free, 1000))
    memory.joined("w", hello(device="GPU-1", kv_bytes=100, weights_bytes=50))
    return memory


def test_without_a_limit_all_is_allowed() -> None:
    memory = MemoryBudget()
    memory.joined("w", hello())
    memory.tokens_inside(1.0, 10**9)
    assert memory.allowed(1.0, "w", idle_s=0) == AllowedMemory(64 * MIB, NORMAL, Residency.AWAKE)


def test_a_token_more_inside_is_its_bytes_less_for_rollouts() -> None:
    memory = stated()
    memory.tokens_inside(0.0, 40)
    before = memory.allowed(0.0, "w", idle_s=0).kv_bytes
    memory.tokens_inside(10.0, 45)
    assert memory.allowed(10.0, "w", idle_s=0).kv_bytes == before - 5 * MIB
    assert memory.serving_bytes == 45 * MIB


def test_both_fit_into_the_limit_whatever_is_inside() -> None:
    memory = stated()
    for now, tokens in enumerate([0, 30, 10, 79, 200, 0, 55]):
        memory.tokens_inside(float(now), tokens)
        allowed = memory.allowed(float(now), "w", idle_s=0).kv_bytes
        assert memory.serving_bytes <= 80 * MIB, "it has no more than its pool"
        assert memory.serving_bytes + allowed <= memory.limit


def test_metrics_of_the_engine_serve_as_well() -> None:
    memory = stated()
    memory.usage(0.0, 0.5)
    assert memory.serving_bytes == 40 * MIB
    assert 0 < memory.allowed(0.0, "w", idle_s=0).kv_bytes <= 60 * MIB


def test_a_cut_lasts_until_it_is_honoured_and_disturbs_only_beyond_the_limit() -> None:
    memory, seen = stated(), []
    memory.allowed(0.0, "w", idle_s=0)
    memory.tokens_inside(0.2, 60)
    for now, used_mib in [(0.2, 60), (0.3, 10)]:
        held = used_mib * MIB
        memory.reported(now, "w", BorrowerReport(kv_bytes_used=held))
        seen.append((memory.serving_bytes + held > memory.limit, memory.allowed(now, "w", idle_s=0).phase == CUT))
    assert seen == [(True, True), (False, False)]


def test_what_is_not_enough_for_one_rollout_is_nothing() -> None:
    memory = stated()
    memory.allowed(0.0, "w", idle_s=0)
    memory.reported(0.1, "w", BorrowerReport(running=2, kv_bytes_used=60 * MIB))
    memory.tokens_inside(0.2, 50)
    assert memory.allowed(0.2, "w", idle_s=0).kv_bytes >= 30 * MIB
    memory.tokens_inside(0.3, 70)
    assert memory.allowed(0.3, "w", idle_s=0).kv_bytes == 0
    memory.tokens_inside(0.4, 0)
    assert memory.allowed(1.4, "w", idle_s=0).kv_bytes >= 80 * MIB


def test_borrowers_share_by_what_they_could_hold() -> None:
    memory = MemoryBudget(limit_mib=100, bytes_per_token=MIB)
    memory.joined("a", hello(60))
    memory.joined("b", hello(30))
    memory.tokens_inside(0.0, 40)
    a, b = (memory.allowed(0.0, name, idle_s=0).kv_bytes for name in "ab")
    assert a == pytest.approx(2 * b, abs=2)
    assert 40 * MIB + a + b <= 100 * MIB
    memory.left("a")
    assert memory.allowed(0.1, "b", idle_s=0).kv_bytes > b


def test_weights_of_a_cpu_engine_go_away_when_serving_needs_even_more_and_come_back_when_it_pays() -> None:
    memory = MemoryBudget(limit_mib=100, bytes_per_token=MIB)
    memory.joined("w", hello(90))
    memory.tokens_inside(0.0, 120)
    assert memory.allowed(0.0, "w", idle_s=0).kv_bytes == 0
    assert memory.allowed(0.1, "w", idle_s=0).residency is Residency.AWAKE, "a moment is no need"
    assert memory.allowed(1.0, "w", idle_s=0).residency is Residency.AWAY
    memory.reported(1.1, "w", BorrowerReport(residency=Residency.AWAY, wake_away_s=10))
    memory.tokens_inside(20.0, 0)
    assert memory.allowed(20.0, "w", idle_s=20).residency is Residency.AWAY
    assert memory.allowed(20.0, "w", idle_s=40).residency is Residency.AWAKE


def test_a_gpu_that_runs_full_sends_weights_to_the_host_or_away_where_the_host_is_full_too() -> None:
    for host_free, goes in [(500, Residency.HOST), (40, Residency.AWAY)]:
        gpu = Gpu(free=200)
        memory = on_gpu(gpu, host_free)
        assert memory.allowed(0.0, "w", idle_s=0) == AllowedMemory(100, NORMAL, Residency.AWAKE)
        gpu.free = 10
        memory.allowed(1.0, "w", idle_s=0)
        assert memory.allowed(2.0, "w", idle_s=0) == AllowedMemory(100, NORMAL, goes), (
            "an engine that cannot go, goes on"
        )


def test_memory_that_cannot_be_read_is_none_until_it_can() -> None:
    gpu = Gpu(free=500)
    memory = on_gpu(gpu)
    gpu.lost = True
    assert memory.allowed(0.0, "w", idle_s=0) == AllowedMemory(0, UNREADABLE, Residency.AWAKE)
    gpu.lost = False
    assert memory.allowed(1.0, "w", idle_s=0) == AllowedMemory(100, NORMAL, Residency.AWAKE)


def test_weights_come_back_to_a_gpu_with_room_for_all_that_they_need() -> None:
    gpu = Gpu(free=170)
    memory = on_gpu(gpu)
    memory.reported(0.0, "w", BorrowerReport(residency=Residency.HOST, wake_host_s=2))
    assert memory.allowed(0.0, "w", idle_s=100).residency is Residency.HOST
    gpu.free = 190
    assert memory.allowed(1.0, "w", idle_s=100).residency is Residency.AWAKE


@pytest.mark.parametrize("serving_kv_mib", [0, 11])
def test_a_limit_that_cannot_be_kept_is_refused(serving_kv_mib: int) -> None:
    with pytest.raises(InvalidRequest, match="memory_limit_mib"):
        MemoryBudget(limit_mib=10, serving_kv_mib=serving_kv_mib)


def test_the_host_says_what_is_free() -> None:
    available, total = host_memory()
    assert 0 < available <= total


def test_a_device_that_is_not_there_is_refused_and_not_taken_for_an_empty_one() -> None:
    with pytest.raises(InvalidRequest, match="device"):
        MemoryBudget().joined("w", hello(device="GPU-00000000-0000-0000-0000-000000000000"))


@pytest.mark.skipif(not Path("/proc/driver/nvidia/gpus").is_dir(), reason="needs an NVIDIA GPU")
def test_nvml_says_how_much_of_a_gpu_is_free() -> None:
    import pynvml

    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    free, total = open_device(uuid).memory()
    assert 0 < free <= total


class Pair:
    """Two borrowing engines beside a served one on a device of 1,000 bytes, and the time. An engine takes what it said,
    and `more` that it did not say; it does as its grant wishes, at once."""

    def __init__(self, *, served: int, pool: int, more: int) -> None:
        self._served, self._takes = served, pool + more
        self.at = {"a": Residency.AWAKE, "b": Residency.AWAKE}
        self.wakes = {"a": 0, "b": 0}
        self.awake_s = {"a": 0.0, "b": 0.0}
        self._now = 0.0
        self._budget = MemoryBudget(device=lambda _: self, host=lambda: (5000, 10000))
        for name in self.at:
            self._budget.joined(name, hello(worker_id=name, device="GPU-1", kv_bytes=pool, weights_bytes=0))

    def memory(self) -> tuple[int, int]:
        """As a `Device`."""
        return 1000 - self._served - self._takes * sum(at is Residency.AWAKE for at in self.at.values()), 1000

    def play(self, seconds: float) -> None:
        """Grants every 50 ms, in an endless idle time."""
        end = self._now + seconds
        while self._now < end:
            for name, at in self.at.items():
                self._budget.reported(self._now, name, BorrowerReport(residency=at, wake_host_s=0.2))
            wished = {name: self._budget.allowed(self._now, name, idle_s=1e6).residency for name in self.at}
            for name, wish in wished.items():
                self.wakes[name] += wish is Residency.AWAKE and self.at[name] is not Residency.AWAKE
                self.awake_s[name] += 0.05 * (wish is Residency.AWAKE)
            self.at = wished
            self._now += 0.05


def test_of_two_engines_that_do_not_fit_together_one_stays_awake() -> None:
    pair = Pair(served=300, pool=400, more=0)
    pair.play(600.0)
    assert max(pair.awake_s.values()) > 590.0
    assert sum(pair.wakes.values()) <= 1


def test_engines_that_take_more_than_they_said_do_not_sleep_and_wake_for_ever() -> None:
    """Each fits by what it said, and lacks a part of the reserve once it runs: one goes, and comes ever less often."""
    pair = Pair(served=160, pool=390, more=25)
    pair.play(3600.0)
    assert sum(pair.wakes.values()) <= 7, "after 1, 2, 4, 8, 16 and 32 minutes"
    assert sum(pair.wakes.values()) >= 3, "what was lacking may be there again"
    assert max(pair.awake_s.values()) > 3590.0


def test_engines_that_leave_five_per_cent_free_stay_awake() -> None:
    pair = Pair(served=170, pool=380, more=10)
    pair.play(60.0)
    assert pair.wakes == {"a": 0, "b": 0}
    assert set(pair.at.values()) == {Residency.AWAKE}


def test_an_engine_that_was_announced_is_not_there_before_its_first_report() -> None:
    memory = MemoryBudget(device=lambda _: Gpu(100), host=lambda: (500, 1000))
    memory.joined("w", hello(slots=0, device="GPU-1", kv_bytes=100, weights_bytes=50))
    assert memory.allowed(0.0, "w", idle_s=1e6).residency is Residency.AWAY


def test_of_two_engines_one_boots_at_a_time_and_what_it_took_does_not_turn_it_back() -> None:
    gpu = Gpu(200)
    memory = MemoryBudget(device=lambda _: gpu, host=lambda: (500, 1000))
    for name in "ab":
        memory.joined(name, hello(worker_id=name, slots=0, device="GPU-1", kv_bytes=100, weights_bytes=50))
    away, awake = Residency.AWAY, Residency.AWAKE

    def wish(now: float, name: str, at: Residency, *, moving: bool = False) -> Residency:
        memory.reported(now, name, BorrowerReport(residency=at, moving=moving, wake_away_s=1.0))
        return memory.allowed(now, name, idle_s=1e6).residency

    assert [wish(0.0, "a", away), wish(0.0, "b", away)] == [awake, away]
    gpu.free = 180
    assert [wish(0.1, "a", away, moving=True), wish(0.1, "b", away)] == [awake, away], "its weights come"
    gpu.free = 100
    assert [wish(0.2, "a", away, moving=True), wish(0.2, "b", away)] == [awake, away]
    memory.joined("a", hello(worker_id="a", slots=0, device="GPU-1", kv_bytes=100, weights_bytes=50))
    gpu.free = 200  # another program gave memory back
    assert wish(0.3, "a", away, moving=True) is awake, "its stream broke, and it still boots"
    assert wish(0.3, "b", away) is away, "the first one has not all of its memory"
    wish(0.4, "a", awake)
    assert wish(0.4, "b", away) is awake
