"""Profiles are files that users read, write and get clear errors about."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile, FitErrors, StepCosts
from ebbtide.simulator.engines.profile_files import read_profile, write_profile
from ebbtide.simulator.engines.trainer_profile import TrainerCosts, TrainerProfile
from tests.unit.simulator.made_up_profiles import engine_profile

COSTS = TrainerCosts(token_s=1e-4, forward_share=0.25)
TRAINER = TrainerProfile(name="t", model="m", device="d", gpus=8, source="made up", costs=COSTS, ranks=8)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    errors = FitErrors(observations=9, median=0.0125, p90=0.5, worst=1.0)
    engine = replace(engine_profile(costs=StepCosts(base_s=1.5e-7, token_s=2.0)), errors=errors, source='a "quote" \\')
    write_profile(engine, tmp_path / "engine.toml")
    assert read_profile(EngineProfile, str(tmp_path / "engine.toml")) == engine
    assert read_profile(EngineProfile, "engine.toml", beside=tmp_path) == engine
    write_profile(TRAINER, tmp_path / "trainer.toml")
    assert read_profile(TrainerProfile, str(tmp_path / "trainer.toml")) == TRAINER


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus = 1", "gpus = -1", r"one.toml: gpus: expected `int` >= 0"),
        ("base_s = 0.25", "base_s = inf", r"one.toml: costs.base_s: must be finite"),
        ("base_s = 0.25", "bass_s = 0.25", r"one.toml: costs.bass_s: unknown key"),
        ('model = "none"', "", r"one.toml: model: is required"),
        ("tokens = 1048576", "tokens = 0", r"one.toml: kv.tokens: expected `int` >= 1"),
        ("[kv]", "[kv", r"one.toml: cannot be read \("),
    ],
)
def test_a_faulty_file_is_refused_by_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "one.toml"
    write_profile(engine_profile(), path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InvalidRequest, match=message):
        read_profile(EngineProfile, str(path))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (EngineProfile, "h100-gpt9", r"h100-gpt9: names no profile; write GPU, .* or a path that ends with .toml"),
        (EngineProfile, "h300x2-qwen3-8b", r"no GPU is called 'h300'; did you mean h\d00\?"),
        (TrainerProfile, "h100x2-qwen3-9b", r"no model is called 'qwen3-9b'; did you mean qwen3-8b\?"),
        (EngineProfile, "h100x16-qwen3-8b", r"h100x16-qwen3-8b: has 16 GPUs; an engine has at most 8"),
        (
            EngineProfile,
            "h100x8-kimi-k2",
            r"Kimi-K2's 1026 GB leave no memory for the KV cache on 8 H100; take",
        ),
    ],
)
def test_a_name_of_no_profile_is_refused_with_what_is_wrong(kind: type[Any], name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_profile(kind, name)
    with pytest.raises(InvalidRequest, match=r"nowhere.toml: cannot be read"):
        read_profile(kind, "nowhere.toml")


@pytest.mark.parametrize(
    "name",
    [
        *("h100x1-qwen3-8b", "h100x2-qwen3-14b", "h100x4-qwen3-32b", "h100x2-qwen3-30b-a3b", "h800x1-qwen2.5-7b"),
        *("h800x2-qwen2.5-32b", "h800x8-qwen2-vl-72b", "h800x1-moonlight-16b-a3b"),
    ],
)
def test_a_derived_engine_is_plausible(name: str) -> None:
    profile = read_profile(EngineProfile, name)
    costs = profile.costs
    assert profile.name == name
    assert 0.004 < costs.step_s(batch=1, context=1000) < 0.1  # seconds
    few, many, longer = (
        costs.step_s(batch=batch, context=batch * context) for batch, context in ((8, 1000), (64, 1000), (64, 8000))
    )
    assert few < many < longer
    assert 8 / few < 64 / many  # tokens/s
    whole_prompt_s = costs.step_s(batch=0, context=0, prefill=8192, pairs=8192 * 8193 // 2)
    assert 0.05 < whole_prompt_s * profile.gpus < 4.0
    assert 100_000 < profile.kv.tokens < 20_000_000
    assert 0.0 < profile.install_pause_s() < 2.0


@pytest.mark.parametrize("name", ["h100x8-qwen3-14b", "h100x16-qwen3-32b", "h800x16-qwen2.5-7b", "h800x64-qwen2.5-32b"])
def test_a_derived_trainer_is_plausible(name: str) -> None:
    profile = read_profile(TrainerProfile, name)
    assert profile.name == name
    short, long = profile.step_s([2000] * 1024), profile.step_s([8000] * 1024)
    assert 4 < long / short < 8  # attention grows with the square
    assert 5.0 < short < 100.0  # seconds
    assert profile.step_s([2000] * 1024, forwards=2) > 1.4 * short
