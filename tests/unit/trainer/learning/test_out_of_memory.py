"""A run that does not fit fails with the settings that would make it fit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.run_client import RunFailed
from ebbtide.trainer.__main__ import _grow_segments
from ebbtide.trainer.learning.learner import Learner
from ebbtide.trainer.learning.out_of_memory import MemoryKnobs, OutOfMemory, naming_knobs, remedies
from ebbtide.trainer.service import train
from tests.unit.trainer.trained_runs import SETTINGS, feed, make_spec

KNOBS = MemoryKnobs(micro_batch_tokens=16384, longest=2000, moments=12 << 30, float32=True, plain=True, ranks=2)


def test_each_setting_that_would_help_is_named_with_its_value_and_no_other() -> None:
    named = remedies(KNOBS)
    assert named == [
        "lower trainer.micro_batch_tokens (16384); no sample had more than 2000 tokens",
        'set trainer.dtype = "bfloat16"',
        "set trainer.gradient_checkpointing = true, which keeps only what enters each layer",
        "set offload of the trainer (EBBTIDE_OFFLOAD=true), which frees 12.0 GiB of each GPU",
        "take more ranks than 2",
    ]
    alone = remedies(KNOBS._replace(longest=20000, moments=0, float32=False, plain=False))
    assert len(alone) == 2
    assert alone[0].startswith("lower sampling.max_tokens, as a sample of 20000 tokens is a micro-batch of its own")
    assert remedies(KNOBS._replace(longest=0, moments=0, float32=False, plain=False)) == ["take more ranks than 2"]


def test_other_errors_of_torch_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), naming_knobs("step 1", "cpu", lambda: KNOBS):
        raise RuntimeError("shapes do not match")
    with (
        pytest.raises(OutOfMemory, match="step 1 ran out of memory on cpu"),
        naming_knobs("step 1", "cpu", lambda: KNOBS),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    full = torch.AcceleratorError("CUDA error: out of memory")
    full.error_code = 2  # type: ignore[attr-defined]
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    for error in (full, cublas, torch.distributed.DistBackendError("NCCL error: out of memory")):
        with pytest.raises(OutOfMemory), naming_knobs("step 1", "cpu", lambda: KNOBS):
            raise error
    for other in (torch.AcceleratorError("CUDA error: an illegal memory access"), RuntimeError("host out of memory")):
        with pytest.raises(type(other)), naming_knobs("step 1", "cpu", lambda: KNOBS):
            raise other
    assert issubclass(OutOfMemory, RunFailed)  # which ends the run; others end the process, which is started again


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_step_without_memory_fails_the_run_at_once(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: Any, streaming: bool
) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")

    monkeypatch.setattr(Learner, "accumulate" if streaming else "step", short)
    spec = make_spec(tiny_model, tmp_path, trainer={"streaming": streaming, "minibatches": 1 if streaming else 2})
    cluster = make_cluster(spec, lambda request: None)
    feeding = asyncio.create_task(feed(cluster))
    try:
        async with asyncio.timeout(60):
            with pytest.raises(OutOfMemory) as caught:
                await train(make_client(cluster), cluster.lease("trainer"), SETTINGS)
    finally:
        feeding.cancel()
    assert "lower trainer.micro_batch_tokens (16384)" in str(caught.value)
    assert "Tried to allocate 5.00 GiB" in str(caught.value)
    assert not cluster.committed  # nothing was trained on
    assert not cluster.named("step")


def test_the_allocator_grows_its_segments_unless_the_user_chose() -> None:
    for chosen in ({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}):
        environ = dict(chosen)
        _grow_segments(environ)
        assert environ == (chosen or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
