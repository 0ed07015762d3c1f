"""Measuring the trainer counts what the learner computes, and cleans up."""

from pathlib import Path

import msgspec
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.profiling.trainer_measuring import measure_trainer, plan_steps
from ebbtide.types.run import BatchSpec, EnvironmentSpec, RunSpec, Sampling, TrainerSpec
from tests.tiny_model import save_tiny_model


def spec(model: Path) -> RunSpec:
    return RunSpec(
        name="measured",
        model=str(model),
        environment=EnvironmentSpec(name="reasoning_gym"),
        batch=BatchSpec(groups_per_step=4, group_size=4),
        sampling=Sampling(max_tokens=8),
        trainer=TrainerSpec(minibatches=2, micro_batch_tokens=48, kl_coefficient=0.1),
    )


def test_steps_are_planned_up_to_the_runs_own_size() -> None:
    steps = plan_steps(spec(Path("model")))
    assert steps[0] == (2, 2, False)  # each minibatch needs a sample
    assert steps[-1] == (16, 8, True)
    assert len(steps) == len(set(steps)) == 12


def test_a_trainer_is_measured(tmp_path: Path) -> None:
    model, told = save_tiny_model(tmp_path / "model"), list[str]()
    measured = measure_trainer(
        spec(model), device="cpu", threads=1, prompt_tokens=4, seconds=0.3, folder=tmp_path, tell=told.append
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert told[0].startswith("loaded in")
    assert len(measured.work) == len(told) - 1
    for work in measured.work:
        assert work.updates == 2
        assert work.micro_batches * 48 >= work.tokens > 0
        assert work.pairs <= work.tokens * 12 / 2
    assert {work.forwards for work in measured.work} <= {0, 1}
    assert 0 < measured.patch_bytes <= measured.weights_bytes
    assert min(measured.start_s, measured.snapshot_s, measured.encode_s, measured.checkpoint_s) > 0.0


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(spec(tmp_path), model=str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="model"):
        measure_trainer(wrong, device="cpu", threads=1, prompt_tokens=4, seconds=0.1, folder=tmp_path, tell=print)
