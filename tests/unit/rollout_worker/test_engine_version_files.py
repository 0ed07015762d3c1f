"""What is refused of a version's files before anything stands still for them."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine.vllm.version_updates import (
    ChangeEntry,
    check_weights,
    how_to_install,
    why_not,
)

torch = pytest.importorskip("torch")
SHAPES = {"a": (4, 6), "b": (3,), "n": (2,)}
DTYPES = {"a": "BF16", "b": "F32", "n": "I64"}
ENTRIES = {name: ChangeEntry(DTYPES[name], shape) for name, shape in SHAPES.items()}


def tensors(**changes: Any) -> dict[str, Any]:
    made = {"a": torch.ones(4, 6, dtype=torch.bfloat16), "b": torch.ones(3), "n": torch.ones(2, dtype=torch.int64)}
    return {name: one for name, one in (made | changes).items() if one is not None}


def save(path: Path, content: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    save_file(content, path)
    return path


def test_a_whole_version_is_known_by_its_header(tmp_path: Path) -> None:
    assert check_weights(save(tmp_path / "v", tensors()), SHAPES, DTYPES) == ENTRIES


def test_other_precisions_of_floating_point_are_taken(tmp_path: Path) -> None:
    found = check_weights(save(tmp_path / "v", tensors(a=torch.ones(4, 6))), SHAPES, DTYPES)
    assert found["a"].dtype == "F32"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"b": None}, "another architecture: see b"),
        ({"c": torch.ones(1)}, "another architecture: see c"),
        ({"a": torch.ones(6, 4, dtype=torch.bfloat16)}, "another architecture: see a"),
        ({"n": torch.ones(2)}, "n is F32, where the model's is I64"),
        ({"a": torch.ones(4, 6, dtype=torch.float8_e4m3fn)}, "a is F8_E4M3"),
    ],
)
def test_what_is_not_the_model_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_weights(save(tmp_path / "v", tensors(**changes)), SHAPES, DTYPES)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_torn_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path / "v", tensors())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_weights(path, SHAPES, DTYPES)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        check_weights(tmp_path / "v", SHAPES, DTYPES)
    assert "cannot be read" in why_not(tmp_path / "c", ENTRIES)


def change(name: str, indices: Any, values: Any) -> dict[str, Any]:
    return {f"{name}.indices": torch.as_tensor(indices), f"{name}.values": values}


def half(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_changes_within_their_tensors_can_be_applied(tmp_path: Path) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for content in (
        change("a", [0, 7, 23], half(1, 2, 3)) | change("b", [2], torch.ones(1)),
        change("b", none, torch.zeros(0)),
        {},
    ):
        assert not why_not(save(tmp_path / "c", content), ENTRIES)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (change("c", [0], half(1)), "c are not those of a tensor"),
        ({"a.indices": torch.tensor([0])}, "a are not those of a tensor"),
        ({"a": half(1)}, "a are not those of a tensor"),
        (change("a", [0], torch.ones(1)), "another type"),
        (change("a", torch.tensor([0], dtype=torch.int32), half(1)), "lack a position"),
        (change("a", [[0]], half(1)), "lack a position"),
        (change("a", [0, 1], half(1)), "lack a position"),
        (change("a", [24], half(1)), "do not ascend within"),
        (change("a", [-1, 2], half(1, 2)), "do not ascend within"),
        (change("a", [3, 3], half(1, 2)), "do not ascend within"),
        (change("a", [4, 3], half(1, 2)), "do not ascend within"),
        (change("a", [3], half(float("nan"))), "not all numbers"),
        (change("n", [1], torch.tensor([5])), "not all numbers"),
    ],
)
def test_changes_that_cannot_be_applied_say_why(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    assert said in why_not(save(tmp_path / "c", content), ENTRIES)


def test_changes_go_in_place_where_every_rank_can_and_nothing_speaks_against_them() -> None:
    assert how_to_install("", ["", ""]) == (True, "")
    assert how_to_install("", ["", "is packed"]) == (False, "is packed")
    assert how_to_install("has NaN", [""]) == (False, "has NaN")
    assert how_to_install(None, ["", "is packed"]) == (False, "")
