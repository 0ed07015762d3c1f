"""Which GPUs a program may use: what NVML lists, and what its environment leaves of it."""

import sys
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import GpuDevice, visible_devices
from tests.fakes.nvml import GB, H100, ImitatedGpu, gpus, nvml


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(gpus(8, used=GB)))


def indexes(**environ: str) -> list[int]:
    return [device.index for device in visible_devices(environ)]


def test_a_device_is_described_with_what_is_free_of_it() -> None:
    assert visible_devices({})[3] == GpuDevice(
        index=3, uuid="GPU-0003-imitated", name=H100, total_bytes=80 * GB, free_bytes=79 * GB
    )


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("4,5", [4, 5]),
        (" 7 , 0", [7, 0]),
        ("GPU-0006,GPU-0002-imitated", [6, 2]),
        ("1,-1,2", [1]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_the_environment_names_devices_and_their_order(visible: str, found: list[int]) -> None:
    assert indexes(CUDA_VISIBLE_DEVICES=visible) == found


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ("9", "'9' names no GPU that is visible; there are 0, 1, 2"),
        ("1,1", "'1' names a GPU twice"),
        ("GPU-000", "'GPU-000' names several GPUs"),
        ("GPU-", "names no GPU"),
    ],
)
def test_a_name_that_is_not_one_devices_is_refused(visible: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        visible_devices({"CUDA_VISIBLE_DEVICES": visible})
    assert refusal.value.field == "CUDA_VISIBLE_DEVICES"


def test_numbers_are_believed_where_cards_differ_only_if_cuda_counts_as_nvml_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixed = [*gpus(1), ImitatedGpu(uuid="GPU-small", name="NVIDIA L4")]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(mixed))
    with pytest.raises(InvalidRequest, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        indexes(CUDA_VISIBLE_DEVICES="1")
    assert indexes(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    assert indexes(CUDA_VISIBLE_DEVICES="GPU-small") == [1]


def test_a_gpu_in_mig_mode_is_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = tuple(ImitatedGpu(uuid=f"MIG-half-{number}", total=40 * GB) for number in range(2))
    whole, divided = gpus(2)
    monkeypatch.setitem(
        sys.modules, "pynvml", nvml([whole, ImitatedGpu(uuid=divided.uuid, total=80 * GB, instances=halves)])
    )
    found = visible_devices({})
    assert [(one.uuid, one.index, one.is_mig) for one in found] == [
        (whole.uuid, 0, False),
        ("MIG-half-0", 1, True),
        ("MIG-half-1", 1, True),
    ]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-half-1,0"}) == (found[2], found[0])


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([], driver=False))
    assert visible_devices({}) == ()


def test_who_lacks_nvmls_module_is_told_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_devices({}, tmp_path) == ()
    (tmp_path / "0000:01:00.0").mkdir()
    with pytest.raises(InvalidRequest, match="nvidia-ml-py: install it"):
        visible_devices({}, tmp_path)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
