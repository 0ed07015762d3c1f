"""What a cluster needs of its machine, read from files, and the memory that it takes and gives back."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.local_cluster import host_resources
from ebbtide.local_cluster.host_resources import checkpoint_size, engine_need, mirror_folder, trainer_bytes

GB = 10**9


def checkpoint(folder: Path, size: int, dtype: str = "bfloat16") -> Path:
    """Two files of so many bytes together, of which the disk has none."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
    for number in range(2):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size // 2)
    return folder


def test_an_engine_gets_longer_to_boot_the_larger_its_weights_are(tmp_path: Path) -> None:
    assert checkpoint_size(Path()).boot_s == 180.0
    assert checkpoint_size(checkpoint(tmp_path / "8b", 16 * GB)).boot_s == pytest.approx(340, abs=1)
    assert checkpoint_size(checkpoint(tmp_path / "70b", 141 * GB)).boot_s == pytest.approx(1590, abs=1)


def test_a_trainers_state_is_counted_by_parameters_without_moments_that_are_on_the_host(tmp_path: Path) -> None:
    half = checkpoint(tmp_path / "half", 16 * GB)
    assert trainer_bytes(half, None) == 18 * 8 * GB
    assert trainer_bytes(checkpoint(tmp_path / "full", 16 * GB, "float32"), None) == 18 * 4 * GB
    (config := tmp_path / "trainer.toml").write_text("offload = true\nkeep_checkpoints = 3\n")
    assert trainer_bytes(half, config) == 10 * 8 * GB


def test_a_workers_file_says_what_it_asks_of_gpus(tmp_path: Path) -> None:
    model, config = checkpoint(tmp_path / "model", 16 * GB), tmp_path / "worker.toml"
    config.write_text(
        """
        slots = 8
        [vllm]
        tensor_parallel_size = 2
        kv_cache_mib = 4096
        gpu_memory_utilization = 0.5
        enforce_eager = true
        engine_args = '{"pipeline_parallel_size": 2, "block_size": 32}'
        """
    )
    need = engine_need("w", model, config)
    assert (need.devices, need.kv_cache_mib, need.utilization, need.weights_bytes) == (4, 4096, 0.5, 16 * GB)
    config.write_text('[vllm]\ndtype = "float32"\n')
    assert engine_need("w", model, config).weights_bytes == 32 * GB
    config.write_text('engine = "mine:make"\n')
    assert not engine_need("w", model, config).is_vllm
    config.write_text('[vllm]\ntensor_parallel_size = "two"\n')
    with pytest.raises(InvalidRequest, match=r"worker\.toml: .*tensor_parallel_size"):
        engine_need("w", model, config)


def test_mirrors_are_in_shared_memory_where_it_has_room_and_nothing_stays(tmp_path: Path) -> None:
    directory, shared = tmp_path / "up", tmp_path / "shm"
    directory.mkdir()
    shared.mkdir()
    with mirror_folder(directory, shared) as mirrors:
        assert "in memory, in" in mirrors.choose(1)
        assert mirrors.path.parent.parent == shared
        assert mirrors.path.parent.stat().st_mode & 0o777 == 0o700
        mirrors.path.mkdir()
        (mirrors.path / "left by a killed worker").touch()
    assert list(shared.iterdir()) == []


def test_mirrors_are_on_disk_where_there_is_no_room_and_the_reason_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "up"
    (directory / "mirrors").mkdir(parents=True)
    for shared in (tmp_path, tmp_path / "none"):
        with mirror_folder(directory, shared) as mirrors:
            assert not (directory / "mirrors").exists(), "what a former cluster left is gone"
            assert "are on disk" in (said := mirrors.choose(10**18))
            assert f"{shared} has room for" in said
            assert mirrors.path == directory / "mirrors"
            mirrors.path.mkdir()
    assert not (directory / "mirrors").exists()


def test_memory_of_a_cluster_that_was_killed_is_freed_by_the_next_one_and_a_living_ones_is_not(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    left, used, other = (shared / f"ebbtide-{os.geteuid()}-{digit * 16}" for digit in "0af")
    for folder in (left, used):
        folder.mkdir(mode=0o700, parents=True)
        (folder / "weights").touch()
    other.symlink_to(tmp_path)
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with mirror_folder(tmp_path / "up", shared):
            assert not left.exists()
            assert (used / "weights").exists()
            assert other.is_symlink()
    finally:
        os.close(lock)


def test_a_folder_that_is_not_this_users_alone_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    with mirror_folder(tmp_path / "up", shared) as mirrors:
        mirrors._own.mkdir(mode=0o755)
        assert "are on disk" in mirrors.choose(1)


def test_the_builds_here_are_for_cpus() -> None:
    """As `make env` installs them."""
    assert not host_resources.vllm_on_gpus()
    assert not host_resources.torch_on_gpus()
