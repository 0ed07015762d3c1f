"""The weights benchmark: its frame, the formats that it compares, and the policies that it makes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import arguments, weights
from benchmarks.distribution import report as links
from benchmarks.patches import level
from benchmarks.patches.formats import bound, entropy, sizes
from benchmarks.patches.level import figures_of, row_of
from benchmarks.patches.memory import peak
from benchmarks.patches.pairs import Pair, Piece, converted, read_pair, read_safetensors, steps_of, synthetic_pair
from benchmarks.patches.plans import RECORD, Plan, version_file
from benchmarks.patches.report import group_of, size_table
from benchmarks.patches.speeds import speeds
from benchmarks.patches.training import make
from ebbtide.errors import InvalidRequest

#: Figures that readers of the file rely on, whatever else is in there.
FIGURES = {
    "patch_over_entropy_bound", "xor_zstd_over_patch", "astraflow_over_patch", "patch_over_best_other",
    "encode_over_memcpy", "apply_over_memcpy", "memory_overhead", "slow_link_bytes_over_one_copy", "full_over_patches",
    "last_install_over_one_transfer", "mutants_accepted",
}  # fmt: skip
TINY = Plan(
    layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, feed_forward_size=48,
    batch=2, steps=20, rates=(1e-6, 1e-4), pairs=1, masters=1e-4, learning_rate=1e-2, warmup=1,
)  # fmt: skip


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "results" / "weights.json"
    status = weights.main([*words, "--out", str(out)])
    return status, json.loads(out.read_text())


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions: a matrix of bfloat16 with 2 % of its elements changed, and a vector that stayed."""
    draw = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(400, 500, generator=draw).to(torch.bfloat16), torch.ones(7)
    changed = matrix.view(torch.int16) + (torch.rand(400, 500, generator=draw) < 0.02).to(torch.int16)
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, value in zip(paths, (matrix, changed.view(torch.bfloat16)), strict=True):
        save_file({"matrix": value, "vector": vector}, path)
    return paths


def test_a_pair_of_files_gives_the_figures_on_sizes_and_says_why_others_are_missing(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    status, told = run(tmp_path, "--from", str(files[0]), "--to", str(files[1]))
    assert status == 0
    assert told["figures"].keys() >= FIGURES
    assert 1 <= told["figures"]["patch_over_entropy_bound"] < 1.1
    assert told["figures"]["xor_zstd_over_patch"] > 1.8
    assert told["figures"]["astraflow_over_patch"] > 6
    assert told["figures"]["apply_over_memcpy"] is None
    assert told["missing"]["apply_over_memcpy"] == "codec brought none"
    assert told["missing"]["mutants_accepted"] == "mutants was not asked for"
    assert told["conditions"].keys() >= {"commit", "cores", "load", "quick", "seconds", "figures"}
    assert told["parts"]["codec"]["sizes"][0]["elements"] == 200_007


def test_figures_of_some_parts_do_not_take_the_place_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "ROOT", tmp_path)
    for words, name in (
        (["--from", "a", "--to", "b"], "weights-given.json"),
        (["--parts", "codec,mutants"], "weights-codec-mutants.json"),
        ([], "weights.json"),
    ):
        assert weights.parse(words).out == tmp_path / "benchmarks" / "results" / name


def test_a_quick_run_writes_below_runs_and_a_named_file_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "ROOT", tmp_path)
    mine = tmp_path / "mine.json"
    assert weights.parse(["--quick"]).out == tmp_path / "runs" / "benchmarks" / "weights.json"
    assert weights.parse(["--quick", "--out", str(mine)]).out == mine


def test_what_a_part_did_less_of_stands_in_the_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    less = {"codec": "fewer pairs", "links": ""}
    monkeypatch.setattr(weights, "run_part", lambda part, *_: {"figures": {}, "less": less[part]})
    _, told = run(tmp_path, "--quick", "--parts", "codec,links")
    assert (told["conditions"]["quick"], told["conditions"]["less"]) == (True, {"codec": "fewer pairs"})
    assert "numba" in told["conditions"]


def link_row(what: str, last_s: float, once: float = 8.0, crossed: float = 1.0) -> dict[str, Any]:
    row = {"what": what, "workers": 8, "one_transfer_s": once, "last_s": last_s, "stall_s": 0.08}
    return {**row, "last_over_one_transfer": last_s / once, "crossed_over_one_copy": crossed}


def test_figures_of_links_are_of_the_worst_scene_and_repetition() -> None:
    rows = [
        link_row(links.STAR, 64.0),
        link_row(links.FULL, 8.0),
        link_row(links.FULL, 8.8, crossed=1.01),
        *(link_row(links.PATCHES, last_s, crossed=0.02) for last_s in (0.3, 0.5, 0.4)),
        link_row(links.FROM_PEERS, 9.6),
        link_row(links.PATCHES_FROM_PEERS, 0.6, crossed=0.03),
        link_row(links.SWEEP, 40.0, once=32.0, crossed=1.005),
        link_row(links.SWEEP, 0.4, once=0.1),  # the machine is what limits there
    ]
    found = links.figures(rows)
    assert found["last_install_over_one_transfer"] == 40 / 32
    assert found["last_install_over_one_transfer_from_peers"] == 9.6 / 8
    assert found["slow_link_bytes_over_one_copy"] == 1.01
    assert found["full_over_patches"] == 8.0 / 0.5
    assert found["star_over_pipelined"] == 8 / 1.1
    assert found["patch_stall_s_per_worker"] == 0.01
    assert weights.kept("full_over_patches", 15.0)
    assert not weights.kept("full_over_patches", 14.9)


def test_files_that_are_no_pair_end_with_2(files: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"matrix": torch.zeros(3)}, other)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x05\0\0\0\0\0\0\0[1,2]")
    for wrong in (other, broken, tmp_path / "none.safetensors"):
        assert weights.main(["--from", str(files[0]), "--to", str(wrong), "--out", str(tmp_path / "x.json")]) == 2
    for words in (["--from", "a"], ["--parts", "nothing"], ["--from", "a", "--to", "b", "--parts", "mutants"]):
        with pytest.raises(SystemExit, match="2"):
            weights.parse(words)


def test_a_mutant_that_passed_and_a_part_that_failed_end_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = SimpleNamespace(accepted=["forged"], tried=9, allowed=0, crashed=[], peak_bytes=5, refused={"broken": 8})
    monkeypatch.setattr(weights, "run_part", lambda part, *_: weights.mutants(verdict))
    status, told = run(tmp_path, "--parts", "mutants")
    assert (status, told["figures"]["mutants_accepted"]) == (1, 1)
    assert "NOT KEPT" in capsys.readouterr().out

    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("no such link")

    monkeypatch.setattr(weights, "run_part", fail)
    status, told = run(tmp_path, "--parts", "codec")
    assert (status, told["failed"]) == (1, {"codec": "RuntimeError: no such link"})


def test_each_format_takes_what_its_layout_says(files: tuple[Path, Path]) -> None:
    row = sizes(read_pair(*files, "given", "two files"))
    changes = row["changes"]
    assert row["density"] == changes / 200_007
    assert row["dense"] == 400_000 + 28
    assert row["coo"] == changes * 6
    assert row["astraflow"] == changes * 10 + 16
    assert row["tiles"] == {"SAME": 1, "SPARSE": 1, "XOR": 0, "DENSE": 0, "PACKED": 0, "SERIES": 0}


def test_the_bound_is_the_entropy_of_positions_and_of_differences() -> None:
    base = np.zeros(1000, np.uint16)
    new = base.copy()
    new[:250] = np.where(np.arange(250) % 2, 1, 65535)
    positions = -(250 * np.log2(0.25) + 750 * np.log2(0.75))
    assert bound(base, new) == pytest.approx((positions + 250) / 8)
    assert bound(base, base) == 0
    assert entropy(np.array([4, 0, 4])) == 8


def test_figures_are_of_the_worst_pair_that_they_are_about() -> None:
    rows = [row_of(synthetic_pair(40_000, density)) for density in (0.002, 0.01, 0.04, 0.5)]
    near, figures = rows[1:3], figures_of(rows)
    assert figures["patch_over_entropy_bound"] == max(row["patch"] / row["bound"] for row in near)
    assert figures["astraflow_over_patch"] == min(row["astraflow"] / row["patch"] for row in near)
    assert figures["patch_over_best_other"] == max(row["patch_over_best_other"] for row in rows)
    assert figures_of(rows[:1])["patch_over_entropy_bound"] is None
    lines = size_table(rows).splitlines()
    assert [group_of(row["density"]) for row in rows] == ["below 0.3 %", "0.3 to 1 %", "1 to 5 %", "above 20 %"]
    assert len(lines) == 2 + 4 + 4


@pytest.mark.parametrize("end", [0, 1])
def test_pairs_at_both_ends_of_what_is_promised_count(end: int) -> None:
    density = [density for density in level.DENSITIES if 0.005 <= density <= 0.05][-end]
    row = row_of(synthetic_pair(level.QUICK_ELEMENTS, density))
    assert 0.005 <= row["density"] <= 0.05
    assert row["density"] == pytest.approx((0.005, 0.05)[end], rel=0.05)
    assert figures_of([row])["patch_over_entropy_bound"] is not None


def test_masters_are_rounded_as_torch_rounds_them() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    bits = values.numpy().view(np.uint32)
    masters = Pair("real", "masters", (Piece("w", "F32", bits, bits),))
    for name, dtype, scale in (("BF16", torch.bfloat16, 1), ("F16", torch.float16, 1), ("F8_E4M3", None, 64)):
        kind = dtype or torch.float8_e4m3fn
        carrier = torch.uint8 if dtype is None else torch.int16
        wanted = (values * scale).to(kind).view(carrier).numpy()
        found = converted(masters, name, "rounded").pieces[0].new
        assert np.array_equal(found, wanted.view(found.dtype)), name


def test_policies_are_trained_and_their_consecutive_versions_kept(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make(TINY, tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["loss_after_training"] < record["loss_of_random_weights"]
    steps = list(steps_of(record["versions"]))
    assert steps == [(1, 1e-6), (3, 1e-4)]
    densities = []
    for number, rate in steps:
        pair = read_pair(tmp_path / version_file(number - 1), tmp_path / version_file(number), "real", f"{rate}")
        densities.append(sizes(pair)["density"])
    assert 0 < densities[0] < densities[1] < 1
    masters = read_safetensors(tmp_path / version_file(3, masters=True))
    published = read_safetensors(tmp_path / version_file(3))
    for name, (_, _, units) in published.items():
        pair = Pair("real", name, (Piece(name, "F32", masters[name][2], masters[name][2]),))
        assert np.array_equal(converted(pair, "BF16", name).pieces[0].new, units)


def test_speeds_are_of_exact_patches_and_of_the_same_rounds() -> None:
    found = speeds(700_000, 0.03, rounds=2, threads=2)
    assert found["bytes"] == 1_400_000
    assert found["density"] == pytest.approx(0.03, rel=0.2)
    assert len(found["all_seconds"]) == len(found["all_cpu_seconds"]) == 2
    assert found["over_memcpy"].keys() == {"memcpy", "encode", "check", "apply", "digests", "publish", "pull"}
    assert found["over_memcpy"]["memcpy"] == 1
    assert all(value > 0 for value in found["over_memcpy"].values())


def test_the_peak_of_memory_is_what_was_touched_at_once() -> None:
    size = 64 << 20
    assert size <= peak(lambda: (np.ones(size, np.uint8), np.ones(size // 2, np.uint8))[0][0]) < 2 * size
    assert peak(lambda: None) < 1 << 20


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (b"", b"\xff" * 30, b"\x02\0\0\0\0\0\0\0{}x", b'\x0f\0\0\0\0\0\0\0{"a":{"x":[1]}}'):
        path.write_bytes(data)
        if data.endswith(b"{}x"):
            assert read_safetensors(path) == {}
            continue
        with pytest.raises(InvalidRequest, match="safetensors"):
            read_safetensors(path)
