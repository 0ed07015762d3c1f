"""Every sample is one rank's, ranks have alike much to do, and all find the same by themselves."""

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from ebbtide.trainer.learning.sample_deal import micro_parts, shares
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks.sharding import weight_files


def sample(length: int, number: int) -> TrainingSample:
    one = np.ones(1)
    return TrainingSample(
        np.full(length, number), one.astype(np.bool_), one.astype(np.float32), one.astype(np.int64), 1.0
    )


def samples(seed: int, count: int = 40) -> list[TrainingSample]:
    draw = Random(seed)
    return [sample(draw.randrange(4, 200), number) for number in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_sample_is_one_ranks_and_tokens_are_alike(ranks: int) -> None:
    for seed in range(20):
        every = samples(seed)
        dealt = shares(every, ranks)
        assert len(dealt) == ranks
        found = Counter(int(one.ids[0]) for share in dealt for one in share)
        assert found == Counter(range(len(every)))
        tokens = [sum(len(one.ids) for one in share) for share in dealt]
        assert max(tokens) - min(tokens) <= max(len(one.ids) for one in every)
        assert [[one.ids[0] for one in share] for share in dealt] == [
            [one.ids[0] for one in share] for share in shares(list(every), ranks)
        ]


def test_one_rank_keeps_the_order() -> None:
    every = samples(3)
    assert shares(every, 1) == [every]


def test_more_ranks_than_samples_leave_some_without() -> None:
    dealt = shares(samples(1, 2), 4)
    assert sorted(map(len, dealt)) == [0, 0, 1, 1]
    assert [list(micro_parts(share, 100)) for share in dealt].count([]) == 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("file_bytes", [1 << 31, 2000])
def test_every_tensor_is_in_one_file_and_files_are_dealt_evenly(ranks: int, file_bytes: int) -> None:
    network = nn.Sequential(*(nn.Linear(16, 8) for _ in range(12)))
    files = weight_files(network, ranks, file_bytes)
    assert [name for names in files for name in names] == list(network.state_dict())
    sizes = [sum(network.state_dict()[name].nbytes for name in names) for names in files]
    largest = 16 * 8 * 4
    assert max(sizes) <= file_bytes + largest
    assert len(files) >= ranks
    if file_bytes == 1 << 31:
        assert len(files) == ranks
        assert max(sizes) - min(sizes) <= 2 * largest


def test_a_tied_tensor_is_written_once() -> None:
    network = nn.Module()
    network.first = nn.Linear(4, 4, bias=False)
    network.second = nn.Linear(4, 4, bias=False)
    network.second.weight = network.first.weight
    assert weight_files(network, 1) == [["first.weight"]]
    assert torch.equal(network.first.weight, network.second.weight)
