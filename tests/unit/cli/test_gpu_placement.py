"""Who runs on which GPU: apart where there are enough, by sizes that add up where they meet, or one clear error."""

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import GpuDevice
from ebbtide.local_cluster.gpu_placement import (
    DEFAULT_UTILIZATION,
    OVERHEAD_BYTES,
    TRAINER,
    EngineNeed,
    Placement,
    chosen_devices,
    place_devices,
    told,
)
from ebbtide.rollout_worker.settings import VllmSettings
from tests.fakes.nvml import GB

MIB = 1 << 20
#: Qwen3-8B's weights in bf16, and what its training holds at 18 bytes a parameter.
WEIGHTS, STATE = 16 * GB, 144 * GB


def cards(count: int, *, free: int = 80 * GB, mig: bool = False) -> list[GpuDevice]:
    kind = "MIG" if mig else "GPU"
    return [
        GpuDevice(index=index, uuid=f"{kind}-{index}", name="H100", total_bytes=80 * GB, free_bytes=free)
        for index in range(count)
    ]


def engine(number: int = 1, devices: int = 1, **changes: object) -> EngineNeed:
    fields = {"name": f"worker-{number}", "devices": devices, "weights_bytes": WEIGHTS}
    return EngineNeed(**(fields | changes))  # type: ignore[arg-type]


def engines(*sizes: int) -> list[EngineNeed]:
    return [engine(number, size) for number, size in enumerate(sizes, start=1)]


def numbers(placement: Placement) -> dict[str, list[int]]:
    return {name: [device.index for device in share.devices] for name, share in placement.items()}


def bytes_of(engine: EngineNeed, placement: Placement) -> int:
    return engine.weights_bytes // engine.devices + OVERHEAD_BYTES + placement[engine.name].kv_cache_mib * MIB


def test_without_gpus_nothing_is_placed() -> None:
    assert place_devices([], engines(1, 1), ranks=3, trainer_bytes=STATE) == {}


def test_ranks_get_the_first_devices_in_order_and_engines_sets_of_the_next_ones() -> None:
    placement = place_devices(cards(8), engines(2, 1, 2), ranks=3, trainer_bytes=STATE)
    assert numbers(placement) == {TRAINER: [0, 1, 2], "worker-1": [3, 4], "worker-2": [5], "worker-3": [6, 7]}
    assert placement[TRAINER].environment == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2"}
    assert all(share.kv_cache_mib == 0 for share in placement.values()), "alone, its own settings hold"


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("each", [1, 2, 4])
def test_no_two_programs_share_a_device_where_there_are_enough(ranks: int, each: int) -> None:
    if (count := (8 - ranks) // each) == 0:
        return
    placement = place_devices(cards(8), engines(*[each] * count), ranks=ranks, trainer_bytes=STATE)
    dealt = [device.uuid for share in placement.values() for device in share.devices]
    assert len(dealt) == len(set(dealt)) == ranks + each * count


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="each of 9 training processes needs a GPU, and 8 can be used") as refusal:
        place_devices(cards(8), [], ranks=9, trainer_bytes=0)
    assert refusal.value.field == "--ranks"


def test_a_set_for_which_too_few_devices_are_left_is_refused_with_the_sum() -> None:
    with pytest.raises(
        InvalidRequest, match=r"worker-2 needs 4 of its own.* 1 \+ 4 \+ 4 GPUs.* 8 can be used"
    ) as refusal:
        place_devices(cards(8), engines(4, 4), ranks=1, trainer_bytes=0)
    assert refusal.value.field == "vllm.tensor_parallel_size"


def test_engines_on_one_device_and_a_trainer_beside_them_get_sizes_that_add_up() -> None:
    small = [engine(number, weights_bytes=1_200_000_000) for number in (1, 2)]
    placement = place_devices(cards(1), small, ranks=1, trainer_bytes=11 * GB)
    assert numbers(placement) == {TRAINER: [0], "worker-1": [0], "worker-2": [0]}
    taken = sum(bytes_of(one, placement) for one in small)
    assert taken + 11 * GB <= 0.95 * 80 * GB
    assert 80 * GB - taken - 11 * GB > 25 * GB, "room for the trainer's activations"
    assert sum(placement[one.name].utilization for one in small) * 80 * GB <= taken + 2 * 0.001 * 80 * GB
    assert placement["worker-1"] == placement["worker-2"]


def test_engines_without_a_trainer_there_divide_the_whole_device() -> None:
    placement = place_devices(cards(2), engines(1, 1), ranks=1, trainer_bytes=STATE)
    assert numbers(placement) == {TRAINER: [0], "worker-1": [1], "worker-2": [1]}
    assert 0.94 < sum(bytes_of(one, placement) for one in engines(1, 1)) / (80 * GB) <= 0.95


def test_sets_stay_whole_where_single_engines_share() -> None:
    placement = place_devices(cards(8), engines(1, 4, 1, 1, 1), ranks=1, trainer_bytes=0)
    assert numbers(placement)["worker-2"] == [1, 2, 3, 4]
    assert [numbers(placement)[f"worker-{number}"] for number in (1, 3, 4, 5)] == [[5], [6], [7], [5]]
    assert {name for name, share in placement.items() if share.kv_cache_mib} == {"worker-1", "worker-5"}


def test_stated_sizes_are_kept_and_the_others_divide_the_rest() -> None:
    stated, fraction, unstated = engine(1, kv_cache_mib=8192), engine(2, utilization=0.3), engine(3)
    placement = place_devices(cards(2), [stated, fraction, unstated], ranks=1, trainer_bytes=0)
    assert placement["worker-1"].kv_cache_mib == 8192
    assert placement["worker-1"].utilization == pytest.approx((WEIGHTS + OVERHEAD_BYTES + 8192 * MIB) / 80e9, abs=1e-3)
    assert placement["worker-2"].utilization == pytest.approx(0.3, abs=2e-3)
    assert sum(bytes_of(one, placement) for one in (stated, fraction, unstated)) <= 0.95 * 80 * GB


@pytest.mark.parametrize(
    ("needs", "ranks", "field", "reason"),
    [
        (
            [engine(1, kv_cache_mib=40_000), engine(2, kv_cache_mib=20_000)],
            1,
            "--gpus",
            "trainer at least 0.0 GB, worker",
        ),
        ([engine(1), engine(2), engine(3), engine(4), engine(5)], 0, "--gpus", "GPU 0 .* has 76.0 of 80.0 GB to share"),
        ([engine(1, utilization=0.2), engine(2)], 1, "vllm.gpu_memory_utilization", "weights and .* raise it"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused_by_name(
    needs: list[EngineNeed], ranks: int, field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        place_devices(cards(1), needs, ranks=ranks, trainer_bytes=0)
    assert refusal.value.field == field


def test_a_trainer_that_fills_the_only_device_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"trainer at least 144\.0 GB, worker-1 at least 18\.5 GB are needed"):
        place_devices(cards(1), engines(1), ranks=1, trainer_bytes=STATE)


def test_what_another_program_uses_of_a_device_is_no_engines() -> None:
    placement = place_devices(cards(2, free=60 * GB), engines(1), ranks=1, trainer_bytes=0)
    assert bytes_of(engine(), placement) <= 60 * GB - 0.05 * 80 * GB
    with pytest.raises(InvalidRequest, match=r"has 6\.0 of 80\.0 GB to share"):
        place_devices(cards(2, free=10 * GB), engines(1), ranks=1, trainer_bytes=0)


def test_a_borrower_sees_its_lenders_devices_and_leaves_it_room() -> None:
    lent = engine(9, 2, name="lent", beside=TRAINER)
    placement = place_devices(cards(8), [*engines(2, 2), lent], ranks=4, trainer_bytes=STATE)
    assert numbers(placement)["lent"] == [0, 1]
    assert bytes_of(lent, placement) + STATE // 4 <= 0.95 * 80 * GB
    assert placement["worker-1"].kv_cache_mib == 0
    with pytest.raises(InvalidRequest, match="its lender has 1"):
        place_devices(cards(8), [lent], ranks=1, trainer_bytes=0)


def test_a_serving_engine_and_who_borrows_it_share_a_device_that_is_not_the_trainers() -> None:
    needs = [engine(0, name="serving", weights_bytes=GB), engine(1, weights_bytes=GB, beside="serving")]
    placement = place_devices(cards(8), needs, ranks=1, trainer_bytes=STATE)
    assert numbers(placement) == {TRAINER: [0], "serving": [1], "worker-1": [1]}
    assert 0.4 < placement["serving"].utilization == placement["worker-1"].utilization < 0.48


def test_an_engine_of_ones_own_gets_a_device_and_no_limits() -> None:
    own = [engine(number, is_vllm=False) for number in (1, 2, 3)]
    assert numbers(place_devices(cards(4), own, ranks=1, trainer_bytes=0))["worker-3"] == [3]
    shared = place_devices(cards(1), own, ranks=1, trainer_bytes=STATE)
    assert {share.kv_cache_mib for share in shared.values()} == {0}


def test_mig_instances_are_dealt_out_by_name_and_never_joined() -> None:
    placement = place_devices(cards(3, mig=True), engines(1, 1), ranks=1, trainer_bytes=0)
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in placement.values()] == ["MIG-0", "MIG-1", "MIG-2"]
    with pytest.raises(InvalidRequest, match=r"^vllm\.tensor_parallel_size: worker-1 cannot be divided among MIG"):
        place_devices(cards(4, mig=True), engines(2), ranks=1, trainer_bytes=0)
    with pytest.raises(InvalidRequest, match=r"^--ranks: "):
        place_devices(cards(4, mig=True), [], ranks=2, trainer_bytes=0)


@pytest.mark.parametrize(
    ("gpus", "found"), [("", [4, 5, 6, 7]), ("2", [4, 5]), ("7,4", [7, 4]), ("6,", [6]), ("GPU-5", [5])]
)
def test_the_option_leaves_the_first_so_many_or_those_in_a_list(gpus: str, found: list[int]) -> None:
    assert [device.index for device in chosen_devices(cards(8)[4:], gpus)] == found


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ("5", "5 are wanted, and 4 can be seen"),
        ("1,", "no GPU that is visible; there are 4, 5, 6, 7"),
        ("0", "at least 1"),
    ],
)
def test_devices_that_are_not_there_are_refused(gpus: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^--gpus: .*{reason}"):
        chosen_devices(cards(8)[4:], gpus)


def test_people_are_told_who_runs_where() -> None:
    placement = place_devices(cards(2), [engine(1, kv_cache_mib=1024), engine(2)], ranks=1, trainer_bytes=0)
    lines = list(told(placement))
    assert lines[:2] == ["trainer: GPU 0", "worker-1: GPU 1, 1024 MiB of KV cache"]


def test_the_fraction_that_vllm_takes_by_default_is_the_workers() -> None:
    assert VllmSettings().gpu_memory_utilization == DEFAULT_UTILIZATION
