"""Shards of an optimiser's state are read as the whole that they were, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ebbtide.trainer.ranks.sharding import read_shards, shard_name

NAME = "/optimizer/state/0/exp_avg"
MOMENTS = torch.arange(32.0).reshape(8, 4)
PARAMETER = nn.Parameter(torch.zeros(8, 4))


def put(folder: Path, rank: int, rows: slice) -> None:
    """The shard of a rank, as torch.distributed.checkpoint writes it."""
    place = json.dumps({NAME: {"saved_offsets": [rows.start, 0]}})
    held = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": place}
    save_file({NAME: MOMENTS[rows].contiguous()}, folder / shard_name(rank), metadata=held)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, 0, slice(0, 5))
    put(tmp_path, 1, slice(5, 8))
    return tmp_path


def test_what_two_ranks_wrote_one_reads(folder: Path) -> None:
    assert torch.equal(read_shards(folder, [PARAMETER])[NAME], MOMENTS)
    with safe_open(folder / shard_name(1), "pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()


def test_shards_that_leave_a_hole_or_lie_over_each_other_are_refused(folder: Path) -> None:
    put(folder, 0, slice(0, 4))
    with pytest.raises(ValueError, match="hold 28 values, and it has 32"):
        read_shards(folder, [PARAMETER])
    put(folder, 0, slice(0, 6))
    with pytest.raises(ValueError, match="hold 36 values, and it has 32"):
        read_shards(folder, [PARAMETER])
    shutil.copy(folder / shard_name(1), folder / shard_name(0))
    with pytest.raises(ValueError, match="hold 24 values"):
        read_shards(folder, [PARAMETER])


def test_state_of_another_shape_than_its_parameter_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(8, 4\), and its parameter of \(8, 2\)"):
        read_shards(folder, [nn.Parameter(torch.zeros(8, 2))])
