"""What a spec may hold at most."""

import math
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling, ShareSpec, TrainerSpec, check_spec


@pytest.mark.parametrize(
    ("params", "field"),
    [({"a": math.nan}, "a"), ({"a": {"b": math.inf}}, "a.b"), ({"a": [1.0, -math.inf]}, r"a\[1\]")],
)
def test_parameters_that_json_cannot_carry_are_refused_by_key(params: dict[str, Any], field: str) -> None:
    spec = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e", params=params))
    with pytest.raises(InvalidRequest, match=f"^environment.params.{field}: must be finite"):
        check_spec(spec)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(stop=("",)), "stop"),
        (Sampling(stop=("x" * 129,)), "stop"),
        (Sampling(stop=("x",) * 129), "stop"),
        (Sampling(stop_token_ids=tuple(range(129))), "stop_token_ids"),
        (Sampling(without_logprobs=True), "without_logprobs"),
    ],
)
def test_sampling_that_a_run_cannot_have_is_refused_by_field(sampling: Sampling, field: str) -> None:
    spec = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"), sampling=sampling)
    with pytest.raises(InvalidRequest, match=f"^sampling.{field}: "):
        check_spec(spec)


@pytest.mark.parametrize(
    ("share", "field"),
    [
        (ShareSpec(weight=math.nan), "weight"),
        (ShareSpec(floor=math.nan), "floor"),
        (ShareSpec(ceiling=math.nan), "ceiling"),
        (ShareSpec(floor=0.6, ceiling=0.5), "floor"),
    ],
)
def test_a_share_that_is_no_number_or_is_beyond_its_own_ceiling_is_refused_by_field(
    share: ShareSpec, field: str
) -> None:
    spec = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"), share=share)
    with pytest.raises(InvalidRequest, match=f"^share.{field}: "):
        check_spec(spec)


def test_a_floor_may_be_all_of_a_ceiling() -> None:
    share = ShareSpec(weight=2.0, floor=0.5, ceiling=0.5, priority=-10)
    spec = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"), share=share)
    assert check_spec(spec).share is share


@pytest.mark.parametrize(
    ("field", "value", "wanted"), [("minibatches", 2, "1"), ("epochs", 2, "1"), ("kl_coefficient", 0.1, "0")]
)
def test_what_a_streamed_step_cannot_do_is_refused_by_field(field: str, value: float, wanted: str) -> None:
    def spec(streaming: bool) -> RunSpec:
        trainer = TrainerSpec(**{field: value}, streaming=streaming)  # type: ignore[arg-type]
        return RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"), trainer=trainer)

    check_spec(spec(streaming=False))
    with pytest.raises(InvalidRequest, match=f"^trainer.{field}: must be {wanted} with trainer.streaming: "):
        check_spec(spec(streaming=True))


def test_workers_are_released_by_runs_that_stream_only() -> None:
    def spec(*, streaming: bool) -> RunSpec:
        trainer = TrainerSpec(releases=True, streaming=streaming)
        return RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e"), trainer=trainer)

    check_spec(spec(streaming=True))
    with pytest.raises(InvalidRequest, match=r"^trainer.releases: needs trainer.streaming"):
        check_spec(spec(streaming=False))
