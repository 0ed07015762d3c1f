"""vLLM's loaders are understood, and a model that was updated, by whichever way, is that which is loaded fresh."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.rollout_worker.engine.vllm import cpu_build
from tests.e2e.exact_changes import write_changes
from tests.e2e.facts import Facts, facts_of
from tests.e2e.tolerances import within

EXACT = within(1e-5)
#: Ranks add up in another order.
CLOSE = within(1e-3)

GROUPS = ["tensor_parallel", "pipeline_parallel", "experts_sharded", "fused_in_checkpoint"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaders")


@pytest.fixture(scope="session")
def seen(checkpoints: Path) -> Facts:
    if not cpu_build.is_cpu_build():
        pytest.skip("these are a CPU build's facts")
    return facts_of("loader_facts", checkpoints)


def same(one: Facts, other: Facts, apart: float) -> bool:
    close = all(abs(a - b) <= apart for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
    return bool(one["ids"] == other["ids"]) and close


@pytest.mark.parametrize("model", ["experts", "experts_bf16", "tied", "int8", "fp8"])
def test_an_updated_model_equals_a_fresh_one_and_finds_back(seen: Facts, model: str) -> None:
    facts = seen[model]
    assert same(facts["updated"], facts["fresh"], EXACT)
    assert same(facts["back"], facts["base"], EXACT)
    assert facts["base"]["ids"] != facts["fresh"]["ids"], "the update changed nothing"


@pytest.mark.parametrize("model", ["experts", "experts_bf16", "tied", "int8", "fp8"])
def test_one_rank_reads_every_tensor_whole(seen: Facts, model: str) -> None:
    for name, boxes in seen[model]["boxes"].items():
        assert len(boxes) == 1, name
        assert all(start == 0 for start, _ in boxes[0]), name


def test_what_is_packed_or_quantised_is_not_changed_in_place(seen: Facts) -> None:
    assert "quantised" in seen["int8"]["obstacle"]
    assert "quantised" in seen["fp8"]["obstacle"]
    assert "pack" in seen["tied"]["obstacle"]


@pytest.mark.parametrize("group", GROUPS)
def test_all_ranks_together_read_every_tensor_whole(seen: Facts, group: str) -> None:
    for name, boxes in seen[group]["union"].items():
        assert len(boxes) == 1, name
        assert all(start == 0 for start, _ in boxes[0]), name


def test_a_rank_reads_its_shard_of_what_is_fused(seen: Facts) -> None:
    first, second = seen["tensor_parallel"]["boxes"]
    layer = "model.layers.1"
    for name, halves in {
        "self_attn.q_proj": ([[0, 64], [0, 128]], [[64, 128], [0, 128]]),
        "self_attn.k_proj": ([[0, 32], [0, 128]], [[32, 64], [0, 128]]),
        "self_attn.o_proj": ([[0, 128], [0, 64]], [[0, 128], [64, 128]]),
        "mlp.up_proj": ([[0, 128], [0, 128]], [[128, 256], [0, 128]]),
        "mlp.down_proj": ([[0, 128], [0, 128]], [[0, 128], [128, 256]]),
    }.items():
        assert (first[f"{layer}.{name}.weight"], second[f"{layer}.{name}.weight"]) == ([halves[0]], [halves[1]]), name
    assert first["model.norm.weight"] == second["model.norm.weight"] == [[[0, 128]]]


def test_a_rank_reads_its_shards_of_what_a_checkpoint_fuses(seen: Facts) -> None:
    _, second = seen["fused_in_checkpoint"]["boxes"]
    layer = "model.layers.1"
    rows = [box[0] for box in second[f"{layer}.self_attn.qkv_proj.weight"]]
    assert rows == [[64, 128], [160, 192], [224, 256]]
    assert [box[0] for box in second[f"{layer}.mlp.gate_up_proj.weight"]] == [[128, 256], [384, 512]]


def test_a_rank_reads_its_shard_of_each_expert(seen: Facts) -> None:
    first, second = seen["experts_sharded"]["boxes"]
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        assert first[f"{name}.up_proj.weight"] == [[[0, 32], [0, 128]]]
        assert second[f"{name}.down_proj.weight"] == [[[0, 128], [32, 64]]]
    assert first["model.layers.0.mlp.gate.weight"] == [[[0, 4], [0, 128]]]


def test_a_stage_reads_its_own_layers_alone(seen: Facts) -> None:
    first, second = seen["pipeline_parallel"]["boxes"]
    assert first["model.layers.0.mlp.up_proj.weight"]
    assert not first["model.layers.1.mlp.up_proj.weight"]
    assert not second["model.layers.0.mlp.up_proj.weight"]
    assert not first["lm_head.weight"]
    assert not second["model.embed_tokens.weight"]


@pytest.mark.parametrize("group", GROUPS)
def test_changes_in_place_make_what_a_load_makes_on_every_rank(seen: Facts, group: str) -> None:
    assert seen[group]["moved"] == ["", ""]
    assert seen[group]["differed"] == [True, True]
    assert seen[group]["equal"] == [True, True]


def test_changes_refused_before_the_first_write_touch_nothing(seen: Facts) -> None:
    assert "NaN" in seen["faults"]["refused"]
    assert seen["faults"]["refused_touched_nothing"]


def test_a_whole_version_is_installed_where_its_changes_are_refused(seen: Facts) -> None:
    assert same(seen["faults"]["instead"], seen["faults"]["wanted"], EXACT)


def test_changes_that_fail_amid_writing_are_told_apart(seen: Facts) -> None:
    assert "nothing" in seen["faults"]["torn"]


def test_a_parameter_that_is_kept_in_another_order_is_found(seen: Facts) -> None:
    assert seen["faults"]["swapped"].startswith("model.layers.0.mlp.gate_up_proj.weight is kept in another form")


def installed_with_changes(first: Path, second: Path, ranks: int) -> Facts:
    changes = write_changes(first, second, first / "changes")
    return facts_of("rank_facts", first, second, changes, ranks)


def test_two_ranks_are_updated_as_one_and_fail_as_one(seen: Facts, checkpoints: Path) -> None:
    facts = installed_with_changes(checkpoints / "tied1", checkpoints / "tied2", 2)
    assert all("pack" in obstacle for _, obstacle in facts["reports"])
    halves = [boxes["model.layers.0.mlp.up_proj.weight"] for boxes, _ in facts["reports"]]
    assert halves == [[[[0, 128], [0, 128]]], [[[128, 256], [0, 128]]]]
    assert facts["boxes"]["model.layers.0.mlp.up_proj.weight"] == [[[0, 256], [0, 128]]]
    assert same(facts["base"], seen["tied"]["base"], CLOSE)
    assert same(facts["changed"], seen["tied"]["fresh"], CLOSE)
    assert same(facts["back"], facts["base"], EXACT)
    assert same(facts["reloaded"], facts["changed"], EXACT)
    assert facts["forced"] == "EngineFailed"


@pytest.mark.parametrize("tied", [False, True])
def test_changes_in_place_on_a_gpu_make_what_a_reload_makes(make_checkpoint: Callable[..., Path], tied: bool) -> None:
    if cpu_build.is_cpu_build():
        pytest.skip("needs a GPU: CPU builds pack their layers")
    facts = installed_with_changes(make_checkpoint(1, tied=tied), make_checkpoint(2, tied=tied), 1)
    assert facts["reports"][0][1] == ""
    assert same(facts["changed"], facts["reloaded"], EXACT)
    assert same(facts["back"], facts["base"], EXACT)
    assert facts["changed"]["ids"] != facts["base"]["ids"], "the update changed nothing"
