"""Checkpoints are whole or absent, and give back exactly what was written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import InvalidRequest
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.collectors import ConsumedTrajectory
from ebbtide.trainer.learning.network import load_network, load_tokenizer
from ebbtide.trainer.training_checkpoint import CheckpointError, TrainingState
from ebbtide.types.run import RunEvent


def state(step: int = 3, **changes: Any) -> TrainingState:
    values: dict[str, Any] = {
        "run_id": "run-1",
        "lineage": "abc",
        "step": step,
        "version": 4,
        "cursor": "7-0",
        "consumed": (ConsumedTrajectory(episode_id="e", cursor="7-0", drop_reason="too_stale"),),
        "reports": (RunEvent(kind="step", key="abc.3", values={"reward": 0.25}),),
    }
    return TrainingState(**(values | changes))


def write(folder: Path, model: Path, saved: TrainingState, learner: Any = None) -> Path:
    return training_checkpoint.write(folder, load_network(model), load_tokenizer(model), learner or {}, saved)


def test_all_comes_back_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    learner = {"optimizer": optimizer.state_dict(), "nested": [{"a": None}, (1, 2.5, True, "text")]}
    torch.manual_seed(5)
    path = write(tmp_path, tiny_model, state(), learner)
    expected = torch.rand(3)
    torch.manual_seed(6)
    found, restored = training_checkpoint.read_state(path, run_id="run-1")
    assert found == state()
    assert torch.equal(torch.rand(3), expected)
    fresh = torch.optim.AdamW(network.parameters(), lr=0.1)
    fresh.load_state_dict(restored["optimizer"])
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert restored["nested"] == [{"a": None}, [1, 2.5, True, "text"]]


def test_an_interrupted_write_leaves_the_one_before(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first = write(tmp_path, tiny_model, state(3))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, tiny_model, state(6))
    monkeypatch.undo()
    assert training_checkpoint.prepare(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_whole_checkpoint_is_never_written_again(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, tiny_model, state(lineage="first"))
    assert write(tmp_path, tiny_model, state(lineage="second")) == path
    assert training_checkpoint.read_state(path, run_id="run-1")[0].lineage == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_newest_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    for step in (2, 10, 4):
        write(tmp_path, tiny_model, state(step))
    training_checkpoint.keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000010"]
    assert training_checkpoint.latest(tmp_path) == tmp_path / "step-000010"


def test_what_is_damaged_or_anothers_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, tiny_model, state())
    with pytest.raises(CheckpointError, match="is of run run-1"):
        training_checkpoint.read_state(path, run_id="run-2")
    for name in ("state.json", "optimizer.safetensors", "random.safetensors"):
        broken = tmp_path / f"broken-{name}"
        shutil.copytree(path, broken)
        (broken / "trainer" / name).write_bytes(b"\x08\x00\x00")
        with pytest.raises(CheckpointError, match="is damaged"):
            training_checkpoint.read_state(broken, run_id="run-1")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("ranks", 10**12, "one is missing: "), ("learner", 5, "object"), ("learner", [], "object")],
)
def test_a_state_that_nobody_wrote_is_refused_without_believing_it(
    tiny_model: Path, tmp_path: Path, key: str, value: Any, said: str
) -> None:
    path = write(tmp_path, tiny_model, state())
    body = json.loads((path / "trainer" / "state.json").read_text())
    (path / "trainer" / "state.json").write_text(json.dumps(body | {key: value}))
    with pytest.raises(CheckpointError, match=f"is damaged .*{said}"):
        training_checkpoint.read_state(path, run_id="run-1")


def test_the_newest_is_that_of_the_last_step_however_many_there_were(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert training_checkpoint.latest(tmp_path) == tmp_path / "step-1000000"
    training_checkpoint.keep_newest(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1000000"]


def test_a_checkpoint_of_another_format_is_refused_by_its_number_and_not_called_damaged(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, tiny_model, state())
    file = path / "trainer" / "state.json"
    body = json.loads(file.read_text())
    body["training"] |= {"format": training_checkpoint.FORMAT + 1, "shards": 2}
    file.write_text(json.dumps(body))
    with pytest.raises(
        CheckpointError,
        match=f"has format {training_checkpoint.FORMAT + 1}, and this trainer reads only {training_checkpoint.FORMAT}",
    ):
        training_checkpoint.read_state(path, run_id="run-1")


def test_what_is_neither_tensor_nor_plain_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="learner/thing: a object cannot be kept"):
        write(tmp_path, tiny_model, state(), {"learner": {"thing": object()}})


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InvalidRequest) as caught:
        training_checkpoint.prepare(tmp_path / "taken" / "checkpoints")
    assert caught.value.field == "output"


def test_what_another_trainer_may_still_write_is_out_of_its_reach_before_any_of_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / ".unfinished-other"
    written.mkdir()
    (written / "config.json").touch()
    remove, in_reach = shutil.rmtree, list[bool]()

    def watched(path: Path) -> None:
        in_reach.append(written.exists())
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert training_checkpoint.prepare(tmp_path) is None
    assert in_reach == [False]
    assert not list(tmp_path.iterdir())
